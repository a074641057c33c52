"""Tiny random models of every supported family: what the tests compare, with every switch of a family turned on.

Nothing stands at a value that hides an error: weights of norms are not 1, biases are not 0, multipliers and caps
matter, and the sliding window is shorter than the prompts of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fxbackend.hf.facts import causal_class

WINDOW = 5
_COMMON: dict[str, object] = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}


def _rope(theta: float, **more: object) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": theta, **more}


# What a family has beyond the common sizes.
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **_MIXED},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {**_MIXED, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 6.0, "query_pre_attn_scalar": 20},
    "gemma3_text": {
        **_MIXED,
        "query_pre_attn_scalar": 20,
        "rope_parameters": {
            "sliding_attention": _rope(10.0),
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e3},
        },
    },
    "phi": {"qk_layernorm": True, "rope_parameters": _rope(100.0, partial_rotary_factor=0.5), "hidden_act": "gelu_new"},
    "phi3": {"sliding_window": WINDOW},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 1.7,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.11,
        "attention_bias": True,
    },
    "cohere": {"logit_scale": 0.4, "use_qk_norm": True, "attention_bias": True},
    "cohere2": {**_MIXED, "logit_scale": 0.4},
    "glm4": {"rope_parameters": _rope(100.0, partial_rotary_factor=0.5), "attention_bias": True},
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3},
    "starcoder2": {"sliding_window": WINDOW, "use_bias": True},
    "stablelm": {
        "qk_layernorm": True,
        "use_qkv_bias": True,
        "rope_parameters": _rope(100.0, partial_rotary_factor=0.25),
    },
    "gpt_neox": {"rope_parameters": _rope(100.0, partial_rotary_factor=0.25), "attention_bias": True},
}


def tiny_config(model_type: str, **changes: object) -> PretrainedConfig:
    """The config of a tiny model of `model_type`, with `changes` on top."""
    return AutoConfig.for_model(model_type, **{**_COMMON, **FAMILIES[model_type], **changes})


def tiny_model(
    model_type: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> PreTrainedModel:
    """A tiny model on eager attention, every parameter random; the same for the same seed."""
    config = tiny_config(model_type, **changes)
    model_class: Any = causal_class(config)
    model = model_class._from_config(config, attn_implementation="eager", dtype=dtype).eval()
    randomise(model, seed)
    return model


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random values for all parameters: attention far from uniform, logits of the order of 1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                parameter.copy_(_scaled(noise, f"{path}.{name}", module))


def _scaled(noise: torch.Tensor, path: str, module: nn.Module) -> torch.Tensor:
    kind = type(module).__name__
    if "Norm" in kind and path.endswith(".weight"):
        return noise * 0.3 + (0.1 if kind.startswith("Gemma") else 1.0)  # Gemma's norms multiply by 1 + weight
    if noise.ndim < 2:
        return noise * 0.3 + 0.05
    if isinstance(module, nn.Embedding):
        return noise * 0.4
    queries_and_keys = any(part in path for part in ("q_proj", "k_proj", "qkv_proj", "query_key_value"))
    return noise * (1.5 if queries_and_keys else 1.0) / noise.shape[-1] ** 0.5


def save_tiny(model_type: str, directory: str | Path, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Saves a tiny model (config and safetensors, no tokenizer) and returns it."""
    model = tiny_model(model_type, seed, **changes)  # type: ignore[arg-type]  # none of them is the dtype
    model.save_pretrained(str(directory))
    return model


def hf_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Transformers' own logits `[T, V]` of one sequence `[T]`."""
    with torch.no_grad():
        return model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
