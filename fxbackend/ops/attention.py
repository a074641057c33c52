"""Attention over sequences that lie one behind the other in a flat row of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fxbackend.ops.registry import dialect_op

_LENGTHS: ContextVar[tuple[int, ...] | None] = ContextVar("fxbackend_sequence_lengths", default=None)


@contextmanager
def sequences(lengths: tuple[int, ...]) -> Iterator[None]:
    """Says how long the sequences of the flat row are while the reference bodies run (default: one sequence)."""
    token = _LENGTHS.set(lengths)
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def _attention_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@dialect_op(shape=_attention_shape)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    alibi: torch.Tensor | None = None,
) -> torch.Tensor:
    """`y = softmax(cap(scale q k^T) + causal mask) v`: q `[T, Hq, D]`, k `[T, H, D]`, v `[T, H, Dv]` -> `[T, Hq, Dv]`.

    `window` w > 0 lets a token see itself and the w - 1 before it, 0 sees all before it; `softcap` c > 0 replaces the
    scores s by c tanh(s / c); `sinks` `[Hq]` adds one more score per head to the denominator (GPT-OSS);
    `alibi` `[Hq]` adds slope (j - i) to the score of key j for query i (Press et al., arXiv:2108.12409).
    """
    lengths = _LENGTHS.get() or (q.shape[0],)
    if sum(lengths) != q.shape[0]:
        raise ValueError(f"sequences of {lengths} tokens do not fill a row of {q.shape[0]} tokens.")
    rows = [
        _one_sequence(*parts, sinks, scale, window, softcap, alibi)
        for parts in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    return torch.cat(rows)


def _one_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    alibi: torch.Tensor | None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(q.shape[0]).unsqueeze(1) - torch.arange(q.shape[0])
    if alibi is not None:
        scores = scores - alibi.float().view(-1, 1, 1) * age.to(scores.device)
    hidden = (age < 0) | (age >= window) if window else age < 0
    scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, q.shape[0], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1)[..., : q.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
