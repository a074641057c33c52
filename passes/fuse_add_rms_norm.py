"""`rms_norm(x + r) = add_rms_norm(x, r)[0]`, and `x + r = add_rms_norm(x, r)[1]`.

Before and after:

    s = aten.add(x, r)
    y = fxbackend.rms_norm(s, w, eps, o, c)     y, s = fxbackend.add_rms_norm(x, r, w, eps, o, c)

The sum may have other users (the residual stream); they read the second result.

Refuses: a sum of different shapes or with a number, or one that is not `[tokens, width]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass, Refuse
from fxbackend.pattern import Expression, keep, op, var
from fxbackend.program import Stage, value_of
from fxbackend.rewriter import Rewriter

dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class FuseAddRmsNorm(PatternPass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_add_rms_norm"
    stage: ClassVar[Stage] = Stage.FUSED

    def patterns(self) -> Mapping[str, Expression]:
        """A norm of a sum."""
        total = keep("total", var("residual") + var("x"))
        return {"add": op(dialect.rms_norm.default, total, *map(var, ("weight", "eps", "offset", "order")))}

    def check(self, match: Match) -> None:
        """Both addends are `[tokens, width]` of one dtype, and no other norm took the sum."""
        shapes = []
        for name in ("x", "residual"):
            operand = match.value(name)
            if not isinstance(operand, fx.Node):
                raise Refuse(f"the sum adds {operand}, which is not a tensor")
            shapes.append((tuple(value_of(operand).shape), value_of(operand).dtype))
        if shapes[0] != shapes[1] or len(shapes[0][0]) != 2:
            raise Refuse(f"the sum adds {shapes[0]} and {shapes[1]}")
        if match.node("total").meta.get("fused"):
            raise Refuse("another norm of the same sum was fused")

    def rewrite(self, rw: Rewriter, match: Match) -> Mapping[fx.Node, fx.Node]:
        """Norm and sum are two results of one op."""
        rest = [match.value(name) for name in ("weight", "eps", "offset", "order")]
        normed, total = rw.calls(dialect.add_rms_norm.default, 2, match.node("x"), match.node("residual"), *rest)
        return {match.root: normed, match.node("total"): total}
