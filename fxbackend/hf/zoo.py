"""A tiny random model of every type in Transformers' causal language-model mapping.

A generic rule fills the fields that a type's own config class declares; `zoo_types.py` holds what one rule cannot know,
with its reasons. As in `tiny.py`, nothing stands at a value that hides an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fxbackend.hf.tiny import FAMILIES, WINDOW, randomise
from fxbackend.hf.zoo_types import EXCLUDED, OVERRIDES, VARIANTS

# The tiny value of a field, whichever class declares it. Sizes differ where they can, so that a swap shows in a shape.
_FIELDS: Mapping[str, object] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 199),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 128),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "n_inner",
            "dff",
            "dim_ff",
            "d_inner",
            "ffn_hidden_size",
            "feed_forward_size",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "prefix_dense_intermediate_size",
        ),
        192,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "decoder_layers",
            "encoder_layers",
            "num_decoder_layers",
            "num_encoder_layers",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "dim_head", "kv_channels", "attention_head_size", "d_head", "swa_head_dim", "global_head_dim"), 32
    ),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "context_length",
            "max_target_positions",
            "max_source_positions",
        ),
        64,
    ),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "keep_window_size"), WINDOW
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), 4),
    "n_routed_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 48
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "moe_num_shared_experts",
            "first_k_dense_replace",
            "num_dense_layers",
        ),
        1,
    ),
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rotary_dim": 16,
    **dict.fromkeys(
        (
            "routed_scaling_factor",
            "route_scale",
            "router_scaling_factor",
            "moe_routed_scaling_factor",
            "embedding_multiplier",
            "scale_emb",
        ),
        1.7,
    ),
    **dict.fromkeys(
        (
            "logits_scaling",
            "lm_head_multiplier",
            "key_multiplier",
            "attention_out_multiplier",
            "attention_in_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        ),
        0.7,
    ),
    **dict.fromkeys(("residual_multiplier", "logit_scale"), 0.4),
    "attention_multiplier": 0.11,
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"), 6.0),
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 20,
    "swiglu_limit": 1.0,
    "clip_qkv": 2.0,
    **dict.fromkeys(
        (
            "attention_bias",
            "mlp_bias",
            "use_bias",
            "bias",
            "qkv_bias",
            "use_qkv_bias",
            "use_qk_norm",
            "qk_layernorm",
            "attention_out_bias",
            "lm_head_bias",
            "norm_bias",
            "scale_embedding",
            "is_decoder",
            "use_sliding_window",
        ),
        True,
    ),
    "is_encoder_decoder": False,  # the decoder half: what the ...ForCausalLM classes of such families make of it
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def model_types() -> tuple[str, ...]:
    """Every type of Transformers' mapping, and the variants `type:variant`, those of `EXCLUDED` left out."""
    return tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS} - EXCLUDED.keys()))


def zoo_config(key: str, **changes: object) -> PretrainedConfig:
    """The config of a tiny model of `type` or `type:variant`, with `changes` on top."""
    model_type = key.partition(":")[0]
    config_class = _config_class(model_type)
    fields = {
        **_generic(config_class),
        **FAMILIES.get(model_type, {}),
        **OVERRIDES.get(model_type, {}),
        **VARIANTS.get(key, {}),
        **changes,
    }
    return config_class(**fields)


def _config_class(model_type: str) -> type[PretrainedConfig]:
    """The config of the causal class; that of a composite type may be for its text part."""
    whole = CONFIG_MAPPING[model_type]
    wanted = MODEL_FOR_CAUSAL_LM_MAPPING[whole].config_class
    return wanted if wanted in (whole.sub_configs or {}).values() else whole


def _generic(config_class: type[PretrainedConfig]) -> dict[str, object]:
    declared = {field.name: field for field in dataclasses.fields(config_class)}
    chosen = {name: value for name, value in _FIELDS.items() if name in declared}
    for name, field in declared.items():
        default = field.default
        if name.endswith(("_token_id", "_token_index")) and isinstance(default, int) and default >= 199:
            chosen[name] = _TOKENS.get(name, 3)
        elif name in _TOKENS and default is None:
            chosen[name] = _TOKENS[name]
        elif ("drop" in name or name.endswith("jitter_noise")) and isinstance(default, float):
            chosen[name] = 0.0
    if {"layer_types", "sliding_window"} <= declared.keys():
        chosen |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}
    if "n_group" in declared:  # a group's score is the sum of its best two
        chosen |= {name: 8 for name in ("num_experts", "n_routed_experts", "num_local_experts") if name in declared}
    if "kv_lora_rank" in declared:  # latent attention has as many key heads as query heads
        chosen["num_key_value_heads"] = 4
    return chosen


def zoo_model(key: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A tiny model on eager attention in float32, everything random; the same for the same seed."""
    config = zoo_config(key, **changes)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[key.partition(":")[0]]]
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model, seed)
    _randomise_buffers(model, seed)
    return model


def _randomise_buffers(model: nn.Module, seed: int) -> None:
    """Buffers of the checkpoint that stand at their initial 0 or 1, such as the biases that correct a router."""
    generator = torch.Generator().manual_seed(seed + 1)
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent and buffer.is_floating_point() and bool(((buffer == 0) | (buffer == 1)).all()):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3 + 0.05)
