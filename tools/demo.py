"""Generate text with a real model through the vLLM engine, served by fxbackend, and show what its passes did.

Usage: ``python tools/demo.py [DIRECTORY] [--verbose]``, as ``make demo`` does after it has unpacked the model.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "smollm2-135m-instruct"
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "The three primary colors are",
    "Once upon a time, in a small village by the sea,",
)
# Read by vLLM and Transformers when they are imported; what the caller has set stays.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: starts sooner, and the report is at hand
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--verbose", action="store_true", help="show the engine's own log")
    arguments = parser.parse_args()
    if not (arguments.directory / "config.json").is_file():
        parser.error(f"no model in {arguments.directory}; run `make demo`, or name a model directory")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not arguments.verbose:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        warnings.simplefilter("ignore", FutureWarning)

    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    start = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - start:5.1f} s] {text}", markup=False)

    say("importing vLLM")
    from vllm import LLM, SamplingParams

    say(f"starting the engine on {arguments.directory.name}")
    llm = LLM(
        str(arguments.directory),
        model_impl="transformers",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=len(PROMPTS),
        disable_log_stats=True,
    )
    say("ready; generating")
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    say("done")

    for report in llm.apply_model(lambda model: getattr(model, "fxbackend_report", None)):
        if report is None:
            raise SystemExit("the engine ran this model without fxbackend; is the package installed and enabled?")
        print(report, flush=True)
    for output in outputs:
        console.print(f"\nprompt:     {output.prompt}", markup=False, style="bold", soft_wrap=True)
        console.print(f"completion: {output.outputs[0].text.strip()}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
