"""Two real processes give the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks

_TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


# Packed q/k/v and a bias after the reduction; one key head that both ranks hold; norms per head and over all heads.
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "gpt_neox": ("gpt_neox", {}),
    "one key head": ("gemma", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "stablelm": ("stablelm", {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("llama", "gpt_neox") else pytest.mark.full) for name in MODELS]
)
def test_two_tensor_parallel_ranks(name: str, forks: Forks, tmp_path: Path) -> None:
    family, changes = MODELS[name]
    tiny.save_tiny(family, tmp_path, **changes)
    dump = tmp_path / "dump"
    environment = _TWO | {"FXBACKEND_DUMP": str(dump)}
    done = forks.run(tasks.compare, str(tmp_path), tensor_parallel_size=2, environment=environment)
    assert done.worst < 1e-4
    assert done.greedy
    assert done.plain == ()
    (run,) = dump.iterdir()
    assert {path.name for path in run.glob("rank*")} == {"rank0", "rank1"}


@pytest.mark.full
def test_two_pipeline_stages(forks: Forks, tmp_path: Path) -> None:
    """Compiled: in eager mode this vLLM's CPU worker does not allocate the buffers between stages."""
    tiny.save_tiny("llama", tmp_path, tie_word_embeddings=True)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    one = forks.run(tasks.tokens, str(tmp_path))
    two = forks.run(
        tasks.tokens,
        str(tmp_path),
        pipeline_parallel_size=2,
        enforce_eager=False,
        timeout=500,
        environment=_TWO | cache,
    )
    assert one == two
