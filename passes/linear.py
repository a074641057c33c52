"""`aten.linear(x, weight, bias) = linear(x, weight, bias)` on two-dimensional x, for trained weights.

Before and after:

    y = aten.linear(x[T, H, I], w, b)           y = fxbackend.linear(x.reshape(T * H, I), w, b).reshape(T, H, O)

Refuses: a weight or bias that is computed by the graph, since no layer of a target can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass
from fxbackend.pattern import Expression, op, slot, var
from fxbackend.program import Stage, shape_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class Linear(PatternPass):
    """See the module's docstring."""

    name: ClassVar[str] = "linear"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def patterns(self) -> Mapping[str, Expression]:
        """With and without bias."""
        x, weight = var("x"), slot("weight")
        return {
            "bias": op(aten.linear.default, x, weight, slot("bias")),
            "plain": op(aten.linear.default, x, weight),
            "none": op(aten.linear.default, x, weight, None),
        }

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        """A dialect linear, between two reshapes where x has more than two dimensions."""
        x, shape = match.node("x"), shape_of(match.node("x"))
        bias = match.node("bias") if match.has("bias") else None
        weight = match.node("weight")
        flat = x if len(shape) == 2 else rw.call(aten.reshape.default, x, [-1, shape[-1]])
        new = rw.call(torch.ops.fxbackend.linear.default, flat, weight, bias)
        if len(shape) == 2:
            return new
        known = [size if isinstance(size, int) else -1 for size in shape_of(match.root)]
        return rw.call(aten.reshape.default, new, known)
