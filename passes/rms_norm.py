"""`x * rsqrt(mean(x^2) + eps) * (offset + weight) = rms_norm(x, weight, eps, offset)`.

Before and after:

    v = aten.mean(aten.pow(f32(x), 2), [-1], True)
    y = weight * dtype(f32(x) * aten.rsqrt(v + eps))            y = fxbackend.rms_norm(x, weight, eps, 0.0, "before")

Forms: Llama (cast, then multiply), Olmo2 (multiply in float32, then cast), Gemma (multiply by 1 + weight in float32),
and without weight. They differ in bfloat16, so each keeps its own cast order.

Refuses: statistics over another dimension than the last or in another dtype than float32, a weight that is not a vector
of x's width, a result of another dtype than x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass, Refuse
from fxbackend.pattern import Expression, cast, mean, number, op, rsqrt, slot, var
from fxbackend.program import Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class RmsNorm(PatternPass):
    """See the module's docstring."""

    name: ClassVar[str] = "rms_norm"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def patterns(self) -> Mapping[str, Expression]:
        """The weighted forms before the bare one, which they hold."""
        x, weight, eps = var("x"), slot("weight"), number("eps")
        wide = cast(x)
        power = mean(wide**2) + eps
        normed = wide * (rsqrt(power) | op(aten.reciprocal.default, op(aten.sqrt.default, power)))
        divided = wide / op(aten.sqrt.default, power)
        return {
            "gemma": cast((normed | divided) * (cast(weight) + 1.0)),
            "before": weight * cast(normed | divided),
            "after": cast(cast(weight) * (normed | divided)),
            "bare": cast(normed | divided),
        }

    def check(self, match: Match) -> None:
        """Over the last dimension, with a vector as weight, and in the dtype of x."""
        x = match.node("x")
        rank = len(shape_of(x))
        if match.value("dims") != [rank - 1]:
            raise Refuse(f"the mean is over dimensions {match.value('dims')} of {rank}, not over the last")
        if match.has("weight") and shape_of(match.node("weight")) != shape_of(x)[-1:]:
            raise Refuse(f"the weight is {list(shape_of(match.node('weight')))}, not a vector of x's width")
        statistics = next(value_of(node).dtype for node in match.nodes if node.target is aten.mean.dim)
        if statistics != torch.float32:
            raise Refuse(f"the statistics are computed in {statistics}, not in float32")
        if value_of(match.root).dtype != value_of(x).dtype:
            raise Refuse(f"the norm turns {value_of(x).dtype} into {value_of(match.root).dtype}")

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        """One norm; its variant becomes offset and cast."""
        weight = match.node("weight") if match.has("weight") else None
        offset = 1.0 if match.pattern == "gemma" else 0.0
        order = "before" if match.pattern in ("before", "bare") else "after"
        eps = match.number("eps")
        return rw.call(torch.ops.fxbackend.rms_norm.default, match.node("x"), weight, eps, offset, order)
