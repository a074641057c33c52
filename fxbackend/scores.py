"""Reads an attention's score function off its values: scale, soft cap, mask and ALiBi slopes.

What lies between the product of queries and keys and the softmax is a function of the scores, of positions and of
constants. It is run on concrete scores, never matched, so its spelling does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from fxbackend.program import Evaluator, Program, shape_of

ScoreFunction = Callable[[torch.Tensor], torch.Tensor]

_HIDDEN = -1000.0  # masks hold large negatives of many kinds; softmax makes nothing of them
_LARGE = 1e6
_SHORT = 512
_LIMIT = 1 << 27  # elements of a score matrix that are evaluated at once


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
    found = []
    for length in lengths:
        function = run(length)
        zero = function(torch.zeros(heads, length, length))
        seen = zero > _HIDDEN
        window, slopes = _window(seen, length), _alibi(zero, seen[0], length)
        # Mask and slopes show at any length; what is done to a score does not depend on it, and short rows will do.
        factors = _slope(function, zero, seen) if length <= max(_SHORT, min(lengths)) else None
        found.append((window, slopes, factors))
    window = max(each for each, _slopes, _factors in found)  # a window shows in rows longer than it
    for what, values in (
        ("bias", [slopes or () for _window, slopes, _factors in found]),
        ("score", [factors for _window, _slopes, factors in found if factors is not None]),
    ):
        if not all(_close(each, values[0]) for each in values):
            raise UnknownScores(f"the {what} differs between rows of {list(lengths)} tokens: {values}")
    (_, slopes, factors) = found[0]  # the shortest row has the least rounding
    assert factors is not None
    return Scores(factors[0], factors[1], window, slopes)


def _close(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return len(one) == len(two) and torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-4)


def _window(seen: torch.Tensor, length: int) -> int:
    if not (seen == seen[0]).all():
        raise UnknownScores("heads see different tokens")
    window = int(seen[0, -1].sum())
    age = torch.arange(length).unsqueeze(1) - torch.arange(length)
    expected = (age >= 0) & (age < window)
    if not torch.equal(seen[0], expected):
        row = int((seen[0] != expected).any(1).nonzero()[0])
        raise UnknownScores(
            f"row {row} of {length} sees tokens {seen[0, row].nonzero().flatten().tolist()[:12]}, which is "
            f"neither causal nor a causal window of {window}"
        )
    return 0 if window == length else window


def _slope(function: ScoreFunction, zero: torch.Tensor, seen: torch.Tensor) -> tuple[float, float]:
    probe = torch.randn(zero.shape, generator=torch.Generator().manual_seed(0))
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
    slopes = (bias * age)[:, seen].sum(1) / (age * age)[seen].sum()
    if not torch.allclose(
        bias[:, seen],
        (slopes[:, None, None] * age)[:, seen],
        rtol=1e-3,
        atol=1e-5 + 1e-6 * float(bias[:, seen].abs().max()),
    ):
        raise UnknownScores("what is added to the scores is no ALiBi slope per head")
    return tuple(_tidy(float(slope)) for slope in slopes)


def _tidy(value: float) -> float:
    """Seven digits: what float32 arithmetic leaves of a literal."""
    return float(f"{value:.7g}")


def scores_between(
    program: Program, product: fx.Node, scores: fx.Node, known: dict[object, Scores] | None = None
) -> Scores:
    """The score function of a program between the product of queries and keys and what the softmax reads.

    Args:
        program: with one token symbol.
        product: `[..., heads, tokens, tokens]`.
        scores: of the same shape, made from `product`, positions and constants.
        known: functions that were read before; layers repeat theirs.

    Raises:
        UnknownScores: the function reads trained weights, or is none of the form of `Scores`.
    """
    region = _region(program, product, scores)
    heads = [size for size in shape_of(product)[:-2] if size != 1]
    if not all(isinstance(size, int) for size in heads):
        raise UnknownScores(f"the product {product.name} is {list(shape_of(product))}, with tokens among the heads")
    count = int(torch.Size(heads).numel())  # type: ignore[arg-type]

    def run(length: int) -> ScoreFunction:
        def function(value: torch.Tensor) -> torch.Tensor:
            shape = [size if isinstance(size, int) else length for size in shape_of(product)]
            inputs = {"positions": torch.arange(length), "input_ids": torch.zeros(length, dtype=torch.int64)}
            evaluator = Evaluator(program.graph, inputs, program.weights.constants)
            values: dict[fx.Node, object] = {product: value.reshape(shape).to(product.meta["val"].dtype)}
            for node in region:
                values[node] = evaluator.value(node, values)
            return cast(torch.Tensor, values[scores]).reshape(count, length, length).float()

        return function

    signature = _signature(program, product, region) if known is not None else None
    if known is not None and signature in known:
        return known[signature]
    with torch.no_grad():
        found = read_scores(run, count, _lengths(region, program.facts.max_model_len, count))
    if known is not None:
        known[signature] = found
    return found


def _signature(program: Program, product: fx.Node, region: list[fx.Node]) -> object:
    """Equal for regions that compute the same: ops, arguments, and the values of constants."""
    numbers = {product: "product", **{node: f"{index}" for index, node in enumerate(region)}}
    rows: list[object] = [str(shape_of(product))]
    for node in region:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: numbers[each])
        value = program.weights.constants.get(str(node.target)) if node.op == "get_attr" else None
        data = None if value is None else (tuple(value.shape), value.contiguous().numpy().tobytes())
        rows.append((node.op, None if data else str(node.target), str(args), str(kwargs), data))
    return tuple(rows)


def _region(program: Program, product: fx.Node, scores: fx.Node) -> list[fx.Node]:
    """What is computed between, in graph order."""
    region: list[fx.Node] = []
    pending, seen = [scores], {product}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "get_attr" and node.target not in program.weights.constants:
            raise UnknownScores(f"the score function reads the trained weight {node.target}")
        region.append(node)
        pending += node.all_input_nodes
    return sorted(region)


def _lengths(region: list[fx.Node], longest: int, heads: int) -> list[int]:
    """Row lengths to test: around every integer of the region, and as long as memory allows."""
    possible = min(longest - 1, int((_LIMIT // heads) ** 0.5))
    numbers = {arg for node in region for arg in node.args if isinstance(arg, int)}
    numbers |= {size for node in region if node.op == "get_attr" for size in shape_of(node) if isinstance(size, int)}
    if beyond := sorted(c for c in numbers if possible + 1 < c < 2**31 and possible + 1 < longest):
        raise UnknownScores(
            f"the numbers {beyond} in the score function lie beyond rows of {possible} tokens, the longest tried"
        )
    integers = {c for c in numbers if 2 < c < possible}
    longest = possible
    wanted = {2, 5, longest} | {near for c in integers for near in (c - 1, c, c + 1, 2 * c + 3)}
    return sorted(length for length in wanted if 2 <= length <= longest)
