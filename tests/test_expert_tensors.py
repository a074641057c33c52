"""Both layouts of a checkpoint, a tensor per expert and all in one, fill the same slots; what lacks is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fxbackend
from fxbackend.errors import WeightError
from fxbackend.hf.tiny import hf_logits
from fxbackend.hf.zoo import zoo_model

IDS = torch.arange(8, 31)
# How the original checkpoints name the first tensor of the first expert.
ORIGINAL = {
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "qwen3_moe": "model.layers.0.mlp.experts.0.gate_proj.weight",
    "phimoe": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "deepseek_v3": "model.layers.1.mlp.experts.0.gate_proj.weight",
    "minimax_m2": "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    "granitemoe": "model.layers.0.block_sparse_moe.input_linear.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",
    "aria_text": "model.layers.0.mlp.experts.fc1.weight",
}


def write(state: dict[str, torch.Tensor], directory: Path) -> None:
    save_file(
        {name: value.contiguous().clone() for name, value in state.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


@pytest.mark.parametrize("key", ORIGINAL)
def test_original_and_packed(key: str, tmp_path: Path) -> None:
    model = zoo_model(key)
    expected = hf_logits(model, IDS)
    original, packed = tmp_path / "original", tmp_path / "packed"
    model.save_pretrained(original)
    assert ORIGINAL[key] in load_file(original / "model.safetensors")
    model.config.save_pretrained(packed)
    write(model.state_dict(), packed)
    for directory in (original, packed):
        torch.testing.assert_close(fxbackend.convert(directory)(IDS)[0], expected, atol=1e-4, rtol=0)


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    zoo_model("mixtral", num_local_experts=12).save_pretrained(tmp_path)
    return tmp_path


def test_the_tenth_expert_comes_after_the_ninth_and_gate_before_up(mixtral: Path) -> None:
    converted = fxbackend.convert(mixtral)
    slot = converted.program.weights.slots["model.layers.0.mlp.experts.gate_up_proj"]
    names = [piece.source.removeprefix("model.layers.0.block_sparse_moe.experts.") for piece in slot.pieces]
    assert names == [f"{expert}.{part}.weight" for expert in range(12) for part in ("w1", "w3")]
    assert slot.folded and slot.shape[0] == 12


def test_a_saved_program_keeps_the_recipe(mixtral: Path, tmp_path: Path) -> None:
    converted = fxbackend.convert(mixtral)
    converted.save(tmp_path / "saved")
    again = fxbackend.convert(tmp_path / "saved")
    assert torch.equal(again(IDS), converted(IDS))
    assert str(again.program.weights) == str(converted.program.weights)


def test_an_expert_that_lacks_is_named(mixtral: Path) -> None:
    state = load_file(mixtral / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.7.w3.weight"]
    write(state, mixtral)
    with pytest.raises(WeightError, match=r"11 tensors '.*w3.*' for 'model.layers.1.mlp.experts.gate_up_proj', .* 12"):
        fxbackend.convert(mixtral)


def test_an_expert_of_another_size_is_named(mixtral: Path) -> None:
    state = load_file(mixtral / "model.safetensors")
    state["model.layers.1.block_sparse_moe.experts.7.w3.weight"] = torch.zeros(3, 128)
    write(state, mixtral)
    with pytest.raises(WeightError, match=r"7.w3.weight is \(3, 128\) in the checkpoint, \(192, 128\) in the model"):
        fxbackend.convert(mixtral)
