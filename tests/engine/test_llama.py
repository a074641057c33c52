"""The lowered Llama beside vLLM's own, and the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import ROOT, Forks

LAYERS = 2
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"


def test_a_layer_holds_the_ops_of_the_native_model_and_nothing_else_but_views(forks: Forks, tmp_path: Path) -> None:
    tiny.save_tiny("llama", tmp_path, num_hidden_layers=LAYERS)
    calls = {impl: forks.run(tasks.layer_calls, str(tmp_path), model_impl=impl) for impl in ("vllm", "transformers")}
    assert calls["transformers"] == calls["vllm"]
    assert calls["transformers"] == {
        "act_and_mul": LAYERS,
        "attention": LAYERS,
        "embedding": 1,
        "gate_up": LAYERS,
        "linear": 2 * LAYERS,
        "norm": 2 * LAYERS + 1,
        "qkv": LAYERS,
        "rope": LAYERS,
    }
    ops = forks.run(tasks.compare, str(tmp_path)).ops
    assert {name for name in ops if not name.startswith("vllm.")} == {"aten.reshape", "getitem"}


@pytest.mark.full
def test_the_real_model_writes_what_transformers_writes(forks: Forks) -> None:
    if not (SMOLLM2 / "model.safetensors").is_file():
        pytest.skip("`make demo` unpacks the real model")
    long = "The quick brown fox jumps over the lazy dog. " * 12
    prompts = [
        "The capital of France is",
        "def fibonacci(n):",
        "Once upon a time",
        "Water boils at",
        "2 + 2 =",
        long + "Then it",
        long + "But the dog",
        "My favourite colour is blue, because",
    ]
    done = forks.run(tasks.written, str(SMOLLM2), prompts, 48, timeout=500)
    print("worst log-probability", max(each.worst for each in done))
    assert all(each.greedy for each in done)
    assert max(each.worst for each in done) < 1e-3
    assert any(each.cached >= 64 for each in done)
