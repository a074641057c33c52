"""Compiled runs: one graph, saved and loaded under a key that is the program's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks


def test_programs_never_share_a_key(forks: Forks, tmp_path: Path) -> None:
    tiny.save_tiny("llama", tmp_path)
    keys = [
        forks.run(tasks.key_of, str(tmp_path), without) for without in (None, None, "fuse_glu", "fuse_add_rms_norm")
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.full
def test_one_graph_that_the_next_start_loads_and_another_program_does_not(forks: Forks, tmp_path: Path) -> None:
    model = tiny.save_tiny("llama", tmp_path)
    cache = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    runs = [
        forks.run(tasks.compiled, str(tmp_path), without, timeout=400, environment=cache)
        for without in (None, None, "fuse_glu")
    ]
    first, again, other = runs
    assert (first.graphs, first.breaks, first.saved, first.loaded) == (1, 0, 1, 0)
    assert (again.saved, again.loaded) == (0, 1)
    assert again.key == first.key
    assert (other.saved, other.loaded) == (1, 0)
    assert other.key != first.key
    for run in runs:
        assert run.tokens == first.tokens
        for prompt, tokens, rows in zip(tasks.PROMPTS, run.tokens, run.logprobs, strict=True):
            expected = tiny.hf_logits(model, torch.tensor(prompt + tokens)).log_softmax(-1)[:-1]
            assert float((expected - rows).abs().max()) < 1e-4
