"""Rotary position embedding over an evaluated table (Su et al., RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import torch

from fxbackend.ops.registry import dialect_op


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    width = table.shape[-1]
    cos, sin = table[positions].unsqueeze(1).chunk(2, -1)
    turned, rest = x[..., :width], x[..., width:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    one, two = first * cos - second * sin, second * cos + first * sin
    out = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


def _rope_shape(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return torch.empty_like(x)


def _rope_qk_shape(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k)


@dialect_op(shape=_rope_shape)
def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`(a, b) -> (a cos - b sin, b cos + a sin)` on the first R of D: x `[T, H, D]`, positions `[T]` -> `[T, H, D]`.

    `table` is `[max_model_len, R]`, cos in the first half of a row and sin in the second. The pairs are halves of the
    rotated part, or neighbours when `interleaved`. The sums are computed in the wider dtype of x and table, and rounded
    to that of x: Olmo2 and Cohere rotate in float32, Llama in the model's dtype.
    """
    return _rotate(x, positions, table, interleaved)


@dialect_op(shape=_rope_qk_shape)
def rope_qk(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q, k = rope(q), rope(k)`: q `[T, Hq, D]`, k `[T, Hkv, D]`, as `rope` on both with one table."""
    return _rotate(q, positions, table, interleaved), _rotate(k, positions, table, interleaved)
