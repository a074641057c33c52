"""Every family against Transformers: logits, not arg-max, through the fused program and its reference bodies.

The prompts are longer than the sliding window of the families that have one, and no switch of a family stands at its
default (see `fxbackend.hf.tiny`).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fxbackend.hf.tiny import FAMILIES, WINDOW, hf_logits, tiny_model
from fxbackend.observers import VerifyEachPass
from fxbackend.ops import sequences
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from tests.programs import captured

LENGTH = 23
assert LENGTH > 2 * WINDOW + 3


@dataclass(frozen=True)
class Expected:
    """How many places of one decoder layer each pass rewrites; norms include the layer's share of none other."""

    rope: int = 2
    qkv: int = 1
    glu: int = 1
    norms: int = 2
    add_norms: int = 2


# What differs from a Llama layer, and why.
LAYERS = {
    "qwen3": Expected(norms=4),  # norms of q and k
    "gemma2": Expected(norms=4),  # norms after both blocks as well
    "gemma3_text": Expected(norms=6),  # those, and norms of q and k
    "olmo2": Expected(norms=4, add_norms=0),  # norms after the blocks, and of q and k over the full width
    "glm4": Expected(norms=4),
    "phi": Expected(glu=0, norms=0, add_norms=0),  # layer norms, a plain MLP
    "starcoder2": Expected(glu=0, norms=0, add_norms=0),
    "gpt_neox": Expected(qkv=0, glu=0, norms=0, add_norms=0),  # q, k and v of each head lie together in one linear
    "stablelm": Expected(norms=0, add_norms=0),  # layer norms
    "cohere": Expected(norms=0, add_norms=0),  # norms that subtract the mean
    "cohere2": Expected(norms=0, add_norms=0),
}
ROPE_LAYERS = {"cohere2": 2, "smollm3": 2}  # the others have no positions at all


def fuse(model: torch.nn.Module) -> Program:
    return default_pipeline().run(captured(model), [VerifyEachPass()])


def flat_logits(program: Program, model: torch.nn.Module, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    with sequences(lengths):
        return program.run({"input_ids": ids, "positions": positions}, program.weights.materialise(model.state_dict()))


def prompt(model: torch.nn.Module, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_counts(model_type: str) -> None:
    model = tiny_model(model_type)
    program = fuse(model)
    ids = prompt(model)
    expected = hf_logits(model, ids)
    assert 0.5 < expected.std() < 10, "logits of this size say little"
    torch.testing.assert_close(flat_logits(program, model, ids, (LENGTH,)), expected, atol=1e-4, rtol=0)

    # Two sequences in one flat row are what they are alone.
    first, second = hf_logits(model, ids[:16]), hf_logits(model, ids[16:])
    both = flat_logits(program, model, ids, (16, LENGTH - 16))
    torch.testing.assert_close(both, torch.cat((first, second)), atol=1e-4, rtol=0)
    check_counts(program, model_type, model.config.num_hidden_layers)


def check_counts(program: Program, model_type: str, layers: int) -> None:
    layer = LAYERS.get(model_type, Expected())
    counts = {record.name: record.matches for record in program.history}
    rotated = ROPE_LAYERS.get(model_type, layers)
    final_norm = int(layer.norms > 0)
    assert counts["attention"] == layers
    assert (counts["rope"], counts["fuse_rope"]) == (layer.rope * rotated, rotated)
    assert (counts["fuse_qkv"], counts["fuse_glu"]) == (layer.qkv * layers, layer.glu * layers)
    assert counts["rms_norm"] == layer.norms * layers + final_norm
    # The first norm of the first layer follows the embedding, not a sum.
    assert counts["fuse_add_rms_norm"] == (layer.add_norms * layers if layer.add_norms else int(model_type == "olmo2"))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": False}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        ("llama", {"head_dim": 48, "num_key_value_heads": 1}),
        ("gemma", {"hidden_activation": "gelu"}),
        ("gemma2", {"tie_word_embeddings": False, "attention_bias": True}),
        ("phi", {"qk_layernorm": False}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5}}),
        ("cohere", {"use_qk_norm": False, "tie_word_embeddings": False}),
        ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
        ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False}),
        ("starcoder2", {"tie_word_embeddings": False, "sliding_window": None}),
    ],
)
def test_variants(model_type: str, changes: dict[str, object]) -> None:
    model = tiny_model(model_type, **changes)
    ids = prompt(model)
    torch.testing.assert_close(
        flat_logits(fuse(model), model, ids, (LENGTH,)), hf_logits(model, ids), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2", "qwen3", "cohere", "granite"])
def test_half_precision(model_type: str) -> None:
    model = tiny_model(model_type, dtype=torch.bfloat16)
    start = captured(model)
    program = default_pipeline().run(start, [VerifyEachPass()])
    ids = prompt(model)
    found, expected = flat_logits(program, model, ids, (LENGTH,)), hf_logits(model, ids)
    # The passes keep the casts of the model: nothing but the summation order of stacked projections may differ ...
    inputs = {"input_ids": ids[None], "positions": torch.arange(LENGTH)[None]}
    before = start.run(inputs, start.weights.materialise(model.state_dict()))[0]
    assert (found - before).abs().max() <= 2 * ulp(before)
    # ... and against Transformers the scores of the attention, which the op keeps in float32.
    assert (found - expected).abs().max() <= 8 * ulp(expected)
    check_counts(program, model_type, model.config.num_hidden_layers)


def ulp(values: torch.Tensor) -> float:
    """The distance of neighbours in bfloat16 at the largest of the values."""
    return float(2.0 ** (values.abs().max().float().log2().floor() - 7))


@pytest.mark.parametrize("heads", [7, 14])
def test_an_odd_number_of_heads_does_not_fix_the_number_of_tokens(heads: int) -> None:
    model = tiny_model(
        "qwen2", num_attention_heads=heads, num_key_value_heads=heads // 7, hidden_size=7 * 16, head_dim=16
    )
    ids = prompt(model)
    torch.testing.assert_close(
        flat_logits(fuse(model), model, ids, (LENGTH,)), hf_logits(model, ids), atol=1e-4, rtol=0
    )
