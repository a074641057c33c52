"""Loading takes no second copy of the weights: the peak is that of vLLM's own Llama."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True])
def test_peak_of_loading_is_that_of_the_native_model(forks: Forks, tmp_path: Path, tied: bool) -> None:
    model = tiny.save_tiny(
        "llama",
        tmp_path,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        head_dim=64,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=16000,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=tied,
    )
    size = sum(parameter.nbytes for parameter in model.parameters())
    del model
    peaks = {
        impl: min(forks.run(tasks.peak, str(tmp_path), model_impl=impl) for _ in range(2))
        for impl in ("vllm", "transformers")
    }
    print(
        f"weights {size >> 20} MiB; peak above the imports: "
        + ", ".join(f"{name} {value >> 20} MiB" for name, value in peaks.items())
    )
    assert peaks["transformers"] < peaks["vllm"] * 1.05
