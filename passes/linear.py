"""`aten.linear(x, weight, bias) = linear(x, weight, bias)` on two-dimensional x, for trained weights.

Before and after:

    y = aten.linear(x[T, H, I], w, b)           y = fxbackend.linear(x.reshape(T * H, I), w, b).reshape(T, H, O)
    y = aten.addmm(b, x, w)                     y = fxbackend.linear(x, w.T, b)

The second form is GPT-2's Conv1D; the recipe of its slot transposes the checkpoint's tensor.

Refuses: a weight or bias that is computed by the graph, since no layer of a target can load it; a weight in the second
form that is read elsewhere as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass, Refuse
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
            "addmm": op(aten.addmm.default, slot("bias"), x, weight),
        }

    def check(self, match: Match) -> None:
        """A slot can be turned only for its only reader."""
        weight = match.node("weight")
        if match.pattern == "addmm":
            slot = str(weight.target)
            if len(weight.users) > 1 or len(shape_of(match.node("bias"))) != 1:
                raise Refuse(f"the weight {slot} of this product is read elsewhere as well, or its bias is no vector")

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        """A dialect linear, between two reshapes where x has more than two dimensions."""
        x, shape = match.node("x"), shape_of(match.node("x"))
        bias = match.node("bias") if match.has("bias") else None
        weight = match.node("weight")
        if match.pattern == "addmm":
            rw.transpose_slot(weight)
        flat = x if len(shape) == 2 else rw.call(aten.reshape.default, x, [-1, shape[-1]])
        new = rw.call(torch.ops.fxbackend.linear.default, flat, weight, bias)
        if len(shape) == 2:
            return new
        known = [size if isinstance(size, int) else -1 for size in shape_of(match.root)]
        return rw.call(aten.reshape.default, new, known)
