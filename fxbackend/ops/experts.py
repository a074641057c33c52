"""Mixture of experts: each token goes through the experts that its router chose. The router itself is plain ATen."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxbackend.ops.projection import ACTIVATIONS
from fxbackend.ops.registry import dialect_op

SWIGLU_OAI = "swiglu_oai"


def gate(gate_up: torch.Tensor, activation: str, alpha: float, limit: float) -> torch.Tensor:
    """The gated unit of an expert: `[..., 2 I]` (gate first) -> `[..., I]`; see `moe`."""
    one, two = gate_up.chunk(2, -1)
    if limit:
        one, two = one.clamp(max=limit), two.clamp(-limit, limit)
    if activation == SWIGLU_OAI:
        return (two + 1) * (one * torch.sigmoid(one * alpha))
    return ACTIVATIONS[activation](one) * two


def _moe_shape(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    return torch.empty_like(x)


@dialect_op(shape=_moe_shape)
def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """`y[t] = sum over k of weights[t, k] * (down[e] (act(gate[e] x[t]) * up[e] x[t]))` with `e = ids[t, k]`.

    x `[T, W]`, ids and weights `[T, K]`, gate_up `[E, 2 I, W]` (gate first), down `[E, W, I]`, biases `[E, 2 I]` and
    `[E, W]` or None -> `[T, W]`. An id of E or more is no expert and adds nothing.

    act is silu, gelu or gelu_tanh; `limit` > 0 cuts the gate off above it and the other half on both sides (DeepSeek
    V4). `swiglu_oai` is `(up + 1) * gate * sigmoid(alpha * gate)` behind such a limit (GPT-OSS). Products are in x's
    dtype, the weighted sum is in the wider one of x and weights, and rounded to that of x.
    """
    count, chosen = down.shape[0], ids.flatten()
    parts = x.new_zeros(chosen.shape[0], x.shape[1])
    for expert in chosen.unique().tolist():
        if 0 <= expert < count:
            rows = (chosen == expert).nonzero().flatten()
            bias, bias_down = (None if each is None else each[expert] for each in (gate_up_bias, down_bias))
            inner = gate(F.linear(x[rows // ids.shape[1]], gate_up[expert], bias), activation, alpha, limit)
            parts[rows] = F.linear(inner, down[expert], bias_down)
    weighted = parts.view(*ids.shape, x.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(x.dtype)


def halves_first(value: torch.Tensor) -> torch.Tensor:
    """Rows 0, 2, 4, ... of dimension 1, then rows 1, 3, 5, ...: an interleaved gate and up become gate, then up."""
    return torch.cat((value[:, 0::2], value[:, 1::2]), 1)


def _hf_experts_shape(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    transposed: bool,
    interleaved: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


@dialect_op(shape=_hf_experts_shape)
def hf_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
    transposed: bool,
    interleaved: bool,
) -> torch.Tensor:
    """`y = moe(x, ids, weights, gate_up', down', ...)`, as called through Transformers' experts interface.

    `transposed` says that the weights are `[E, W, 2 I]` and `[E, I, W]`, `interleaved` that gate and up of an expert
    lie row by row between each other.
    """
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    if interleaved:
        gate_up = halves_first(gate_up)
        gate_up_bias = None if gate_up_bias is None else halves_first(gate_up_bias)
    return moe(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit)
