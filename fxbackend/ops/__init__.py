"""The dialect: a small set of functional ops whose plain torch bodies are their meaning."""

from fxbackend.ops.attention import attention, sequences
from fxbackend.ops.captured import attention_mask, hf_attention
from fxbackend.ops.collective import all_gather, all_reduce, stage_cut
from fxbackend.ops.experts import hf_experts, moe
from fxbackend.ops.norm import add_rms_norm, rms_norm
from fxbackend.ops.projection import ACTIVATIONS, embedding, glu, linear, lm_head, qkv
from fxbackend.ops.registry import OPS, DialectOp, dialect_op, is_dialect
from fxbackend.ops.rotary import rope, rope_qk

__all__ = [
    "ACTIVATIONS",
    "OPS",
    "DialectOp",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "attention",
    "attention_mask",
    "dialect_op",
    "embedding",
    "glu",
    "hf_attention",
    "hf_experts",
    "is_dialect",
    "linear",
    "lm_head",
    "moe",
    "qkv",
    "rms_norm",
    "rope",
    "rope_qk",
    "sequences",
    "stage_cut",
]
