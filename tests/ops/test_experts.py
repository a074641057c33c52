"""The op `moe` against an independent spelling: every expert for every token, then the chosen ones."""

from __future__ import annotations

import math

import pytest
import torch

dialect = torch.ops.fxbackend

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 7, 6, 5, 4, 3


def weights_of(bias: bool, dtype: torch.dtype = torch.float32) -> list[torch.Tensor | None]:
    """gate_up, down and the biases."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER), (EXPERTS, 2 * INNER), (EXPERTS, WIDTH)]
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return made if bias else [*made[:2], None, None]


def routed(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, ids and weights; an expert that no token chose, and one that a token chose twice."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    ids = torch.randint(0, EXPERTS - 1, (TOKENS, CHOSEN), generator=generator)
    ids[0] = torch.tensor([2, 2, 0])
    return x, ids, torch.rand(TOKENS, CHOSEN, generator=generator)


def by_hand(gate: float, up: float, activation: str, alpha: float, limit: float) -> float:
    if limit:
        gate, up = min(gate, limit), max(-limit, min(up, limit))
    if activation == "swiglu_oai":
        return (up + 1) * gate / (1 + math.exp(-alpha * gate))
    if activation == "silu":
        return up * gate / (1 + math.exp(-gate))
    if activation == "gelu":
        return up * gate * (1 + math.erf(gate / math.sqrt(2))) / 2
    return up * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "alpha", "limit"),
    [
        ("silu", 0.0, 0.0),
        ("gelu", 0.0, 0.0),
        ("gelu_tanh", 0.0, 0.0),
        ("silu", 0.0, 0.8),
        ("swiglu_oai", 1.702, 0.9),
        ("swiglu_oai", 1.3, 0.0),
    ],
)
def test_moe(activation: str, alpha: float, limit: float, bias: bool) -> None:
    x, ids, weights = routed()
    gate_up, down, gate_up_bias, down_bias = weights_of(bias)
    found = dialect.moe(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit)
    for token in range(TOKENS):
        expected = torch.zeros(WIDTH)
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            both = gate_up[expert] @ x[token] + (gate_up_bias[expert] if bias else 0)
            inner = [by_hand(float(both[i]), float(both[INNER + i]), activation, alpha, limit) for i in range(INNER)]
            expected += weight * (down[expert] @ torch.tensor(inner) + (down_bias[expert] if bias else 0))
        torch.testing.assert_close(found[token], expected, atol=1e-5, rtol=1e-5)


def test_an_id_that_is_no_expert_adds_nothing() -> None:
    x, ids, weights = routed()
    held = weights_of(True)
    ids[1, 0], ids[2] = EXPERTS, EXPERTS
    found = dialect.moe(x, ids, weights, *held, "silu", 0.0, 0.0)
    assert torch.equal(found[2], torch.zeros(WIDTH))
    ids[1, 0], weights[1, 0] = 0, 0.0
    torch.testing.assert_close(found[1], dialect.moe(x, ids, weights, *held, "silu", 0.0, 0.0)[1])


def test_rows_are_independent() -> None:
    x, ids, weights = routed()
    held = weights_of(False)
    whole = dialect.moe(x, ids, weights, *held, "silu", 0.0, 0.0)
    rows = [
        dialect.moe(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], *held, "silu", 0.0, 0.0) for i in range(TOKENS)
    ]
    torch.testing.assert_close(whole, torch.cat(rows), atol=1e-6, rtol=1e-6)
    assert dialect.moe(x[:0], ids[:0], weights[:0], *held, "silu", 0.0, 0.0).shape == (0, WIDTH)


def test_bfloat16_is_summed_in_the_wider_dtype_and_rounded_once() -> None:
    x, ids, weights = routed(torch.bfloat16)
    held = weights_of(False, torch.bfloat16)
    parts = []
    for choice in range(CHOSEN):
        one = dialect.moe(x, ids[:, choice : choice + 1], torch.ones(TOKENS, 1), *held, "silu", 0.0, 0.0)
        parts.append(one.float() * weights[:, choice : choice + 1])
    found = dialect.moe(x, ids, weights, *held, "silu", 0.0, 0.0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, torch.stack(parts).sum(0).to(torch.bfloat16), atol=0, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_captured_call_is_moe_on_turned_weights(transposed: bool, interleaved: bool) -> None:
    x, ids, weights = routed()
    gate_up, down, gate_up_bias, down_bias = weights_of(True)
    expected = dialect.moe(x, ids, weights, gate_up, down, gate_up_bias, down_bias, "gelu", 0.0, 0.0)
    if interleaved:
        order = [half * INNER + i for i in range(INNER) for half in (0, 1)]
        gate_up, gate_up_bias = gate_up[:, order], gate_up_bias[:, order]
    if transposed:
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    found = dialect.hf_experts(
        x, ids, weights, gate_up, down, gate_up_bias, down_bias, "gelu", 0.0, 0.0, transposed, interleaved
    )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
