"""Projections: embedding, linear, stacked q/k/v, gated unit, language-model head. Values are `[tokens, width]`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from fxbackend.ops.registry import dialect_op

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dialect_op()
def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`y[t] = weight[ids[t]]`: vocabulary embedding, ids `[T]` int64, weight `[V, W]` -> `[T, W]`."""
    return F.embedding(ids, weight)


@dialect_op()
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`y = x @ weight.T + bias`: x `[T, I]`, weight `[O, I]`, bias `[O]` or None -> `[T, O]`."""
    return F.linear(x, weight, bias)


@dialect_op()
def qkv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, q_size: int, k_size: int, v_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`q, k, v = split(x @ weight.T + bias)`: x `[T, I]`, weight `[q + k + v, I]` -> `[T, q]`, `[T, k]`, `[T, v]`."""
    q, k, v = F.linear(x, weight, bias).split([q_size, k_size, v_size], -1)
    return q, k, v


@dialect_op()
def glu(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`y = act(x[:, :I]) * x[:, I:]`: x `[T, 2 I]` (gate first) -> `[T, I]`; act is silu, gelu or gelu_tanh."""
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


@dialect_op()
def lm_head(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`y = x @ weight.T + bias` over the vocabulary: x `[N, W]`, weight `[V, W]` -> `[N, V]`.

    It and what follows is computed for sampled rows only, on all ranks' vocabulary.
    """
    return F.linear(x, weight, bias)
