"""Two real processes give the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks

_TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_two_tensor_parallel_ranks(family: str, forks: Forks, tmp_path: Path) -> None:
    tiny.save_tiny(family, tmp_path)
    dump = tmp_path / "dump"
    done = forks.run(
        tasks.compare, str(tmp_path), tensor_parallel_size=2, environment=_TWO | {"FXBACKEND_DUMP": str(dump)}
    )
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
