"""Capture: what stands on the nodes, what becomes a constant, which ropes are frozen, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fxbackend
from fxbackend.errors import CaptureError
from fxbackend.hf.capture import capture
from fxbackend.hf.facts import read_facts
from fxbackend.hf.tiny import hf_logits, tiny_model
from fxbackend.printer import target_text
from fxbackend.program import Program, Stage, module_of
from tests.own_model import own_model

FREQUENCIES = 16


def captured(model_type: str, max_model_len: int | None = None, **changes: object) -> Program:
    model = tiny_model(model_type, **changes)  # type: ignore[arg-type]
    return capture(type(model), model.config, read_facts(model.config, "X", torch.float32, max_model_len))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(length))


def test_nodes_know_their_modules() -> None:
    program = captured("llama")
    assert program.stage is Stage.CAPTURED
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    linears = [module_of(node) for node in calls if target_text(node.target) == "aten.linear"]
    assert linears[:4] == [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    assert linears[-1] == "lm_head"
    assert {module_of(node) for node in program.calls(torch.ops.fxbackend.hf_attention.default)} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }
    assert all(node.meta.get("val") is not None for node in calls if target_text(node.target).startswith("aten"))


def test_a_tied_weight_is_one_slot() -> None:
    plan = captured("qwen3").weights
    assert plan.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in plan.slots
    assert "lm_head.weight" in captured("llama").weights.slots


def test_buffers_are_constants_with_their_values() -> None:
    model = tiny_model("llama")
    plan = captured("llama").weights
    assert list(plan.constants) == ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"]
    assert torch.equal(plan.constants["model.rotary_emb.inv_freq"], model.model.rotary_emb.inv_freq)
    assert not plan.slots["model.rotary_emb.inv_freq"].pieces


def test_capture_leaves_no_trace() -> None:
    model = tiny_model("llama", use_cache=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fxbackend.convert(model)
    assert model.config.use_cache
    assert "fxbackend" not in ALL_ATTENTION_FUNCTIONS.valid_keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_ropes_equal_transformers(rope: str) -> None:
    model = tiny_model("llama", rope_parameters={"rope_theta": 100.0, **ROPES[rope]})
    converted = fxbackend.convert(model)
    assert not converted.report.notes
    for length in (5, 64):
        torch.testing.assert_close(converted(tokens(length))[0], hf_logits(model, tokens(length)), rtol=1e-5, atol=1e-5)


def longrope() -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(FREQUENCIES)],
        "long_factor": [2.0 + i for i in range(FREQUENCIES)],
    }


@pytest.mark.parametrize(("max_model_len", "length"), [(64, 33), (64, 64), (32, 5), (32, 32)])
def test_longrope_is_frozen_on_the_side_of_max_model_len(max_model_len: int, length: int) -> None:
    model = tiny_model("phi3", rope_parameters=longrope())
    converted = fxbackend.convert(model, max_model_len=max_model_len)
    (note,) = converted.report.notes
    assert "longrope" in note
    assert f"max_model_len={max_model_len}" in note
    torch.testing.assert_close(converted(tokens(length))[0], hf_logits(model, tokens(length)), rtol=1e-5, atol=1e-5)


def test_dynamic_rope_is_frozen_at_full_length() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0})
    hf_logits(model, tokens(120))  # the model in hand has seen a longer row; that must not show
    seen = model.model.rotary_emb.inv_freq.clone()
    converted = fxbackend.convert(model, max_model_len=96)
    assert torch.equal(model.model.rotary_emb.inv_freq, seen)
    assert "'dynamic' depends on the length" in converted.report.notes[0]
    fresh = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0})
    torch.testing.assert_close(converted(tokens(96))[0], hf_logits(fresh, tokens(96)), rtol=1e-5, atol=1e-5)


def test_sinks_are_an_operand_of_the_attention() -> None:
    model = own_model("sinks")
    converted = fxbackend.convert(model)
    nodes = converted.program.calls(torch.ops.fxbackend.attention.default)
    assert [str(node.args[3].target) for node in nodes] == ["blocks.0.attention.sinks", "blocks.1.attention.sinks"]
    ids = tokens(9).unsqueeze(0)
    torch.testing.assert_close(converted(ids), model(ids).logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("trick", "says"),
    [
        ("branch", "branches on the number of tokens: .* > 20"),
        ("fixed", r"fixes the number of tokens: .*must match.*own_model.py:\d+"),
        ("host", r"reads the value of a tensor on the host.*own_model.py:\d+"),
        ("keyword", "'temperature' .* which fxbackend does not map"),
        ("bidirectional", "not causal"),
    ],
)
def test_nothing_is_specialised_or_dropped_in_silence(trick: str, says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        fxbackend.convert(own_model(trick))


def test_an_attribute_that_was_set_after_building_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.scaling = 0.9
    with pytest.raises(
        CaptureError, match=r"layers\.1\.self_attn\.scaling is 0\.9 in the model and .* change the config"
    ):
        fxbackend.convert(model)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"returns no logits .*ForCausalLM"):
        fxbackend.convert(tiny_model("llama").model)


def test_a_second_capture_knows_nothing_of_the_first() -> None:
    one, two = (captured("gemma2") for _ in range(2))
    assert [node.name for node in one.graph.nodes] == [node.name for node in two.graph.nodes]
    assert one.fake_mode is not two.fake_mode
