"""Reads an attention's score function off its values: scale, soft cap, mask and ALiBi slopes.

What lies between the product of queries and keys and the softmax is a function of the scores, of positions and of
constants. It is run on concrete scores, never matched, so its spelling does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

ScoreFunction = Callable[[torch.Tensor], torch.Tensor]

_HIDDEN = -1000.0  # masks hold large negatives of many kinds; softmax makes nothing of them
_SMALL, _LARGE = 1.0, 1e6


class UnknownScores(Exception):
    """The score function is none that a paged attention computes; says why."""


@dataclass(frozen=True)
class Scores:
    """A score function `cap(scale * s) + slope * (j - i)` under a causal mask.

    Attributes:
        scale: factor of the product.
        softcap: c of `c tanh(s / c)`, 0 for none.
        window: how many tokens a token sees, itself included; 0 for all before it.
        slopes: ALiBi slope per head, None for none.
    """

    scale: float
    softcap: float
    window: int
    slopes: tuple[float, ...] | None


def read_scores(run: Callable[[int], ScoreFunction], heads: int, lengths: Sequence[int]) -> Scores:
    """The parameters of a score function.

    Args:
        run: gives the function for rows of n tokens; it maps `[heads, n, n]` to `[heads, n, n]`.
        heads: number of query heads.
        lengths: the n to test; all must agree.

    Raises:
        UnknownScores: values differ from every function of the form.
    """
    found = [_read(run(length), heads, length) for length in lengths]
    window = max(each.window for each in found)  # a window shows in rows longer than it
    found = [each for each in found if each.window == window]
    if not all(_close(each, found[-1]) for each in found):
        raise UnknownScores(f"the score function differs between rows of {list(lengths)} tokens: {found[0]}, {found[-1]}")
    return found[0]  # the shortest row has the least rounding


def _close(one: Scores, two: Scores) -> bool:
    numbers = [(each.scale, each.softcap, *(each.slopes or ())) for each in (one, two)]
    return len(numbers[0]) == len(numbers[1]) and torch.allclose(*map(torch.tensor, numbers), rtol=1e-4)


def _read(function: ScoreFunction, heads: int, length: int) -> Scores:
    zero = function(torch.zeros(heads, length, length))
    seen = zero > _HIDDEN
    window = _window(seen, length)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(heads, length, length, generator=generator)
    scale, softcap = _slope(function, zero, seen, probe)
    return Scores(scale, softcap, window, _alibi(zero, seen[0], length))


def _window(seen: torch.Tensor, length: int) -> int:
    if not (seen == seen[0]).all():
        raise UnknownScores("heads see different tokens")
    window = int(seen[0, -1].sum())
    age = torch.arange(length).unsqueeze(1) - torch.arange(length)
    expected = (age >= 0) & (age < window)
    if not torch.equal(seen[0], expected):
        row = int((seen[0] != expected).any(1).nonzero()[0])
        raise UnknownScores(f"row {row} of {length} sees tokens {seen[0, row].nonzero().flatten().tolist()[:12]}, which is "
                            f"neither causal nor a causal window of {window}")
    return 0 if window == length else window


def _slope(function: ScoreFunction, zero: torch.Tensor, seen: torch.Tensor, probe: torch.Tensor) -> tuple[float, float]:
    change = (function(probe) - zero)[seen]
    inputs = probe[seen]
    scale = float((change * inputs).sum() / (inputs * inputs).sum())
    rounding = 1e-5 + 1e-6 * float(zero[seen].abs().max())  # what float32 leaves of a small score beside a large bias
    if torch.allclose(change, scale * inputs, rtol=1e-4, atol=rounding):
        # A cap far above the probe looks linear there.
        far = (function(probe.sign() * _LARGE) - zero)[seen]
        if torch.allclose(far, scale * inputs.sign() * _LARGE, rtol=1e-3):
            return _tidy(scale), 0.0
    cap = float((function(probe.sign() * _LARGE) - zero)[seen].abs().max())
    tiny = 1e-3
    scale = float(((function(probe.sign() * tiny) - zero)[seen] * inputs.sign()).mean() / tiny)
    if torch.allclose(change, cap * torch.tanh(scale * inputs / cap), rtol=1e-3, atol=1e-4):
        return _tidy(scale), _tidy(cap)
    raise UnknownScores("the scores are neither a multiple of the product nor a soft cap of one")


def _alibi(zero: torch.Tensor, seen: torch.Tensor, length: int) -> tuple[float, ...] | None:
    bias = zero - zero.diagonal(dim1=1, dim2=2).unsqueeze(2)  # softmax does not see what a row has in common
    age = (torch.arange(length) - torch.arange(length).unsqueeze(1)).float()
    if bool((bias[:, seen].abs() < 1e-6).all()):
        return None
    slopes = ((bias * age)[:, seen].sum(1) / (age * age)[seen].sum())
    if not torch.allclose(bias[:, seen], (slopes[:, None, None] * age)[:, seen], rtol=1e-3, atol=1e-5 + 1e-6 * float(bias[:, seen].abs().max())):
        raise UnknownScores("what is added to the scores is no ALiBi slope per head")
    return tuple(_tidy(float(slope)) for slope in slopes)


def _tidy(value: float) -> float:
    """Seven digits: what float32 arithmetic leaves of a literal."""
    return float(f"{value:.7g}")
