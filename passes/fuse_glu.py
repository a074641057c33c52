"""`act(linear(x, wg)) * linear(x, wu) = glu(linear(x, [wg; wu]))` for act in silu, gelu, gelu_tanh.

Before and after:

    g = fxbackend.linear(x, wg, bg)
    u = fxbackend.linear(x, wu, bu)             p = fxbackend.linear(x, gate_up_weight, gate_up_bias)
    y = aten.silu(g) * u                        y = fxbackend.glu(p, "silu")

or packed already, `p = linear(x, w); y = act(p[:, :I]) * p[:, I:]`, gate first (Phi-3) or second; then only the recipe
of the slot is put into gate, up order.

Refuses: projections of different values, one with and one without bias, weights that are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass, Refuse
from fxbackend.pattern import Expression, Op, number, op, slot, var
from fxbackend.program import Stage, common_path, shape_of
from fxbackend.rewriter import Rewriter
from fxbackend.weights import Piece

aten = torch.ops.aten
dialect = torch.ops.fxbackend


def _activations(x: Expression) -> dict[str, Op]:
    return {
        "silu": op(aten.silu.default, x),
        "gelu": op(aten.gelu.default, x),
        "gelu_tanh": op(aten.gelu.default, x, approximate="tanh"),
    }


@dataclass(frozen=True)
class FuseGlu(PatternPass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_glu"
    stage: ClassVar[Stage] = Stage.FUSED

    def patterns(self) -> Mapping[str, Expression]:
        """Two linears, or two halves of one; the product commutes."""
        x = var("x")
        gate = op(dialect.linear.default, x, slot("gate"), var("gate_bias"))
        up = op(dialect.linear.default, x, slot("up"), var("up_bias"))
        packed = op(dialect.linear.default, x, slot("packed"), var("packed_bias"))
        first = op(aten.slice.Tensor, packed, 1, 0, number("half"))
        second = op(aten.slice.Tensor, packed, 1, number("half"), number("width"))
        return {
            **{name: act * up for name, act in _activations(gate).items()},
            **{f"packed {name}": act * second for name, act in _activations(first).items()},
            **{f"swapped {name}": act * first for name, act in _activations(second).items()},
        }

    def check(self, match: Match) -> None:
        """Bias on both or on none; weights of this place alone; halves of equal width."""
        if match.has("packed"):
            width = shape_of(match.node("packed"))[0]
            if (match.number("half") * 2, match.number("width")) != (width, width):
                raise Refuse(f"gate and up are not the halves of a linear of width {width}")
            operands = [match.value("packed"), match.value("packed_bias")]
        else:
            if (match.value("gate_bias") is None) != (match.value("up_bias") is None):
                raise Refuse("one of gate and up has a bias and the other has none")
            operands = [match.value(name) for name in ("gate", "up", "gate_bias", "up_bias")]
        for operand in operands:
            if isinstance(operand, fx.Node) and (operand.op != "get_attr" or len(operand.users) > 1):
                raise Refuse(f"{operand.target} is not a weight that only this place reads")

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        """One stacked linear and the gated unit."""
        if match.has("packed"):
            weight, bias = match.node("packed"), match.value("packed_bias")
            for operand in (weight, bias):
                if isinstance(operand, fx.Node):
                    _order(rw, str(operand.target), swapped=match.pattern.startswith("swapped"))
        else:
            gate, up = match.node("gate"), match.node("up")
            prefix = common_path([gate, up])
            weight = rw.stack(f"{prefix}.gate_up_proj.weight", [gate, up])
            bias = match.value("gate_bias")
            if bias is not None:
                bias = rw.stack(f"{prefix}.gate_up_proj.bias", [match.node("gate_bias"), match.node("up_bias")])
        stacked = rw.call(dialect.linear.default, match.node("x"), weight, bias)
        return rw.call(dialect.glu.default, stacked, match.pattern.split()[-1])


def _order(rw: Rewriter, name: str, swapped: bool) -> None:
    """States the two halves of a packed slot in its recipe, gate first."""
    stored = rw.weights.slots[name]
    (piece,) = stored.pieces
    half = stored.shape[0] // 2
    parts = [Piece(piece.source, (0, 0, half)), Piece(piece.source, (0, half, half))]
    rw.weights.replace(name, pieces=tuple(reversed(parts) if swapped else parts), sections=(half, half))
