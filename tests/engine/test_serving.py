"""Who serves a model, what is said when nobody can, and what is written on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks

OURS = ("FxbackendForCausalLM", "fxbackend.targets.vllm.model")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save_tiny("llama", folder)
    return str(folder)


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("olmo2")
    tiny.save_tiny("olmo2", folder)
    return str(folder)


@pytest.fixture(scope="module")
def expected(forks: Forks, llama: str) -> list[list[int]]:
    return forks.run(tasks.tokens, llama)


def test_disabled_plugin_leaves_vllm_alone(forks: Forks, llama: str, expected: list[list[int]]) -> None:
    name, module, tokens = forks.run(tasks.served_by, llama, environment={"FXBACKEND_ENABLE": "0"})
    assert name == "TransformersForCausalLM"
    assert module.startswith("vllm.")
    assert tokens == expected


def test_auto_is_ours_where_vllm_has_no_class(forks: Forks, olmo2: str) -> None:
    assert forks.run(tasks.served_by, olmo2, model_impl="auto")[:2] == OURS


def test_auto_leaves_vllms_own_classes(forks: Forks, llama: str, expected: list[list[int]]) -> None:
    name, module, tokens = forks.run(tasks.served_by, llama, model_impl="auto")
    assert (name, module) == ("LlamaForCausalLM", "vllm.model_executor.models.llama")
    assert tokens == expected


def test_a_model_that_cannot_be_converted_is_one_clear_error(forks: Forks, llama: str) -> None:
    text = forks.run(tasks.error_of, llama, "attention")
    assert "fxbackend.attention_mask(" in text
    assert " in model: " in text
    assert "was not rewritten" in text
    assert "set FXBACKEND_FALLBACK=1" in text


def test_fallback_is_vllms_own_backend(forks: Forks, llama: str, expected: list[list[int]]) -> None:
    name, module, tokens = forks.run(tasks.served_by, llama, "attention", environment={"FXBACKEND_FALLBACK": "1"})
    assert name == "TransformersForCausalLM"
    assert module.startswith("vllm.")
    assert tokens == expected
    assert forks.run(tasks.served_by, llama, environment={"FXBACKEND_FALLBACK": "1"})[:2] == OURS


def test_a_checkpoint_that_does_not_fit_is_one_message(forks: Forks, tmp_path: Path) -> None:
    tiny.save_tiny("llama", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
    state["model.layers.0.extra.weight"] = torch.ones(3)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = forks.run(tasks.error_of, str(tmp_path))
    assert "Missing: model.layers.1.mlp.up_proj.weight, model.norm.weight." in text
    assert "Unexpected: model.layers.0.extra.weight." in text


def test_heads_that_the_ranks_do_not_divide(forks: Forks, llama: str) -> None:
    text = forks.run(tasks.error_of, llama, tensor_parallel_size=3)
    assert "attention heads (4) must be divisible by" in text


def test_a_users_own_class(forks: Forks) -> None:
    assert forks.run(tasks.own_class) < 1e-4


def test_a_saved_program(forks: Forks, llama: str, expected: list[list[int]], tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    forks.run(tasks.saved, llama, folder)
    name, module, tokens = forks.run(tasks.served_by, folder)
    assert (name, module) == OURS
    assert tokens == expected
    text = forks.run(tasks.error_of, folder, dtype="bfloat16")
    assert "a program saved for torch.float32" in text


def test_dump(forks: Forks, llama: str, tmp_path: Path) -> None:
    forks.run(tasks.tokens, llama, environment={"FXBACKEND_DUMP": str(tmp_path)})
    (folder,) = tmp_path.glob("*_LlamaForCausalLM/rank0")
    (lowered,) = folder.glob("*_lower/after.txt")
    assert "vllm.QKVParallelLinear" in lowered.read_text()
    assert "lower" in (folder / "summary.txt").read_text()
