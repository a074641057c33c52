"""The plugin: which names become ours, what stays with vLLM, and what vLLM's own checks are answered."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.config import ModelConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import get_config

from fxbackend.errors import UnsupportedModelError
from fxbackend.targets.vllm import compat, model, plugin


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    plugin.register()
    plugin.register()


def folder(tmp_path: Path, architecture: str, model_type: str, **more: object) -> str:
    base = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(base | more))
    return str(tmp_path)


def engine_config(path: str, **more: object) -> ModelConfig:
    return ModelConfig(model=path, dtype="float32", max_model_len=64, skip_tokenizer_init=True, **more)


def test_names_of_the_generic_class_are_ours_and_no_others() -> None:
    ours = {name for name, entry in ModelRegistry.models.items() if getattr(entry, "class_name", "") == compat.PROGRAM}
    assert ours >= {
        "TransformersForCausalLM",
        "GPTNeoXForCausalLM",
        "PhiForCausalLM",
        "Olmo2ForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "FxbackendForCausalLM",
        "TransformersMoEForCausalLM",
        "FlexOlmoForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "MellumForCausalLM",
    }
    for name in (
        "LlamaForCausalLM",
        "MixtralForCausalLM",
        "TransformersMultiModalForCausalLM",
        "TransformersMultiModalMoEForCausalLM",
        "TransformersEmbeddingModel",
        "TransformersMoEEmbeddingModel",
    ):
        assert name not in ours


def test_the_class_inspects_well_in_a_process_of_its_own(tmp_path: Path) -> None:
    config = engine_config(folder(tmp_path, "LlamaForCausalLM", "llama"), model_impl="transformers")
    info, name = config.registry.inspect_model_cls(config.architectures, config)
    assert name == "TransformersForCausalLM"
    assert info.architecture == "FxbackendForCausalLM"
    assert info.is_text_generation_model
    assert info.supports_pp
    flags = (
        info.is_pooling_model,
        info.supports_multimodal,
        info.is_hybrid,
        info.has_inner_state,
        info.supports_transcription,
        info.is_attention_free,
    )
    assert not any(flags)


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Olmo2ForCausalLM", "olmo2"),  # a name of the generic class
        ("CodeGenForCausalLM", "codegen"),  # attention written by hand: vLLM alone refuses it
    ],
)
def test_auto_comes_to_us_where_vllm_has_no_class_of_its_own(
    tmp_path: Path, architecture: str, model_type: str
) -> None:
    config = engine_config(folder(tmp_path, architecture, model_type))
    cls, _ = config.registry.resolve_model_cls(config.architectures, config)
    assert cls is model.FxbackendForCausalLM
    assert compat.left(config) is None


def test_auto_leaves_native_classes_alone(tmp_path: Path) -> None:
    config = engine_config(folder(tmp_path, "LlamaForCausalLM", "llama"))
    assert config._model_info.architecture == "LlamaForCausalLM"


def test_pooling_stays_with_vllm(tmp_path: Path) -> None:
    config = engine_config(folder(tmp_path, "Olmo2ForCausalLM", "olmo2"), runner="pooling")
    cls, _ = config.registry.resolve_model_cls(config.architectures, config)
    assert cls.__module__.startswith("vllm.")
    assert config._model_info.architecture == "TransformersForCausalLM"


def test_experts_come_to_us(tmp_path: Path) -> None:
    path = folder(tmp_path, "MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2)
    config = engine_config(path, model_impl="transformers")
    assert config._model_info.architecture == "FxbackendForCausalLM"


def test_a_latent_model_is_served_with_full_attention(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=24,
        v_head_dim=32,
        n_routed_experts=0,
        first_k_dense_replace=2,
    )
    config = engine_config(path, model_impl="transformers")
    if config._model_info.architecture != compat.PROGRAM:
        pytest.skip("this config counts as one with experts")
    assert not config.use_mla


def test_a_model_that_cannot_be_converted_is_left_to_vllm_once_and_for_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(config: ModelConfig) -> None:
        calls.append(config)
        raise UnsupportedModelError("node x of module y does z.")

    monkeypatch.setattr(model, "convert", fail)
    monkeypatch.setenv("FXBACKEND_FALLBACK", "1")
    config = engine_config(folder(tmp_path, "Olmo2ForCausalLM", "olmo2"))
    assert len(calls) == 1
    assert config._model_info.architecture == "TransformersForCausalLM"
    assert config.using_transformers_backend()
    monkeypatch.delenv("FXBACKEND_FALLBACK")
    on_a_rank = pickle.loads(pickle.dumps(config))
    assert compat.left(on_a_rank) == "node x of module y does z."
    cls, _ = on_a_rank.registry.resolve_model_cls(on_a_rank.architectures, on_a_rank)
    assert cls.__module__.startswith("vllm.")
    assert len(calls) == 1


def test_a_model_that_nobody_can_serve_raises_in_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXBACKEND_FALLBACK", "1")
    path = folder(tmp_path, "CodeGenForCausalLM", "codegen", n_embd=64, n_head=4, n_layer=2)
    with pytest.raises(ValueError, match="not compatible with vLLM"):
        engine_config(path, model_impl="transformers")


def test_the_config_of_a_saved_program_is_known(tmp_path: Path) -> None:
    path = folder(tmp_path, "FxbackendForCausalLM", "fxbackend_program", head_dim=16, own_field=[1, 2])
    config = get_config(path, trust_remote_code=False)
    assert config.own_field == [1, 2]
    for impl in ("auto", "transformers"):
        made = engine_config(path, model_impl=impl)
        assert made._model_info.architecture == "FxbackendForCausalLM"
        assert made.get_head_size() == 16
        pickle.loads(pickle.dumps(made))


def test_disabled_plugin_changes_nothing() -> None:
    code = (
        "from fxbackend.targets.vllm.plugin import register; register();"
        "from vllm.model_executor.models.registry import ModelRegistry as M;"
        "assert M.models['TransformersForCausalLM'].module_name.startswith('vllm.');"
        "assert 'FxbackendForCausalLM' not in M.models"
    )
    environment = {"FXBACKEND_ENABLE": "0", "PATH": "", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=Path(__file__).parents[2])
