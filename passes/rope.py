"""`x * cos + rotate(x) * sin = rope(x, positions, table)`.

Before and after, for the first r of D dimensions (all of them when there is no `cat` at the end):

    a = x[..., :r] * cos[positions] + cat(-x[..., r/2:r], x[..., :r/2]) * sin[positions]
    y = cat(a, x[..., r:])                      y = fxbackend.rope(x, positions, table, interleaved=False)

`rotate` is by halves (Llama, GPT-NeoX) or by neighbours (`interleaved`: Cohere, GLM, GPT-J). cos and sin are evaluated
tables, so the frequencies, scaling and type of the rope are in the table.

The sums are computed in the dtype of the joint table, as in the model: Olmo2 and Cohere rotate in float32.

Refuses: cos and sin tables whose two halves (or neighbours) differ, or that are trained; a result in another dtype than
x; a rotation of other parts than the tables are wide, or not over `[heads, tokens, width]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar
from typing import cast as cast_type

import torch
from torch import fx

from fxbackend.matcher import Match
from fxbackend.pass_base import PatternPass, Refuse
from fxbackend.pattern import Expression, Var, cast, items, number, op, shared, slot, var
from fxbackend.program import Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten
dialect = torch.ops.fxbackend


def _table(name: str) -> Expression:
    """A row of an evaluated table per token, with one axis for the heads."""
    row = op(aten.embedding.default, slot(name), var("positions"))
    return shared(op(aten.unsqueeze.default, row, number("head_axis")))


def _halves(x: Expression) -> Expression:
    first = op(aten.slice.Tensor, x, Var("last"), 0, number("half"))
    second = op(aten.slice.Tensor, x, Var("last"), number("half"), number("width"))
    return op(aten.cat.default, items(-second, first), Var("last"))


def _neighbours(x: Expression) -> Expression:
    even = op(aten.slice.Tensor, x, Var("last"), 0, number("width"), 2)
    odd = op(aten.slice.Tensor, x, Var("last"), 1, number("width"), 2)
    stacked = op(aten.stack.default, items(-odd, even), Var("after_last"))
    return op(aten.reshape.default, stacked, var("shape"))


def _rotated(x: Expression, turn: Callable[[Expression], Expression]) -> Expression:
    """In the model's dtype (Llama), or in float32 by a cast (Cohere) or by float32 tables (Olmo2)."""
    wide = cast(x)
    return cast(wide * _table("cos") + turn(wide) * _table("sin"))


@dataclass(frozen=True)
class Rope(PatternPass):
    """See the module's docstring."""

    name: ClassVar[str] = "rope"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def patterns(self) -> Mapping[str, Expression]:
        """Partial forms first: they hold the whole ones."""
        x = var("x")
        part = op(aten.slice.Tensor, x, Var("last"), 0, number("rotated"))
        rest = op(aten.slice.Tensor, x, Var("last"), number("rotated"), number("size"))

        def partial(turn: Callable[[Expression], Expression]) -> Expression:
            return op(aten.cat.default, items(_rotated(part, turn), rest), Var("last"))

        return {
            "partial": partial(_halves),
            "partial_interleaved": partial(_neighbours),
            "full": _rotated(x, _halves),
            "full_interleaved": _rotated(x, _neighbours),
        }

    def check(self, match: Match) -> None:
        """The tables must be one set of angles written twice, and the layout must be tokens and heads."""
        x, axis = match.node("x"), int(match.number("head_axis"))
        shape = shape_of(x)
        if len(shape) != 3 or axis not in (0, 1) or not isinstance(shape[1 - axis], torch.SymInt):
            raise Refuse(f"x is {list(shape)} with heads on axis {axis}, which is not [heads, tokens, width]")
        if match.value("last") != 2 or (match.has("after_last") and match.value("after_last") != 3):
            raise Refuse("the rotation is not over the last dimension")
        width = value_of(match.node("cos")).shape[-1]
        if match.has("rotated") and (match.number("rotated"), match.number("size")) != (width, shape[2]):
            raise Refuse("the part that is left unrotated does not follow the rotated one")
        if match.number("width") != width or (match.has("half") and match.number("half") * 2 != width):
            raise Refuse("the halves of the rotation are not halves of the tables")
        if match.has("shape"):
            match.value("shape")  # proved by the shape of the sum: stack and reshape interleave the last dimension
        if not match.has("rotated") and shape[2] != width:
            raise Refuse(f"x is {shape[2]} wide, the tables are {width}")
        if value_of(match.root).dtype != value_of(x).dtype:
            raise Refuse("the rotation changes the dtype of x")
        match.facts["interleaved"] = "interleaved" in match.pattern
        match.facts["dtype"] = next(value_of(node).dtype for node in match.nodes if node.target is aten.add.Tensor)

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        """One rope over a joint table; tokens first."""
        interleaved = bool(match.facts["interleaved"])
        dtype = cast_type(torch.dtype, match.facts["dtype"])
        table = _joint(rw, str(match.node("cos").target), str(match.node("sin").target), interleaved, dtype)
        x, transposed = match.node("x"), match.number("head_axis") == 0
        if transposed:
            x = rw.call(aten.transpose.int, x, 0, 1)
        new = rw.call(dialect.rope.default, x, match.node("positions"), table, interleaved)
        return rw.call(aten.transpose.int, new, 0, 1) if transposed else new


def _joint(rw: Rewriter, cos: str, sin: str, interleaved: bool, dtype: torch.dtype) -> fx.Node:
    """The table `[L, R]` that holds each angle's cos, then each angle's sin, in the dtype of the sums."""
    columns = []
    for source in (cos, sin):
        if source not in rw.weights.constants:
            raise Refuse(f"{source} is a trained weight, not an evaluated table")
        table = rw.weights.constants[source]
        first, second = (table[:, 0::2], table[:, 1::2]) if interleaved else table.chunk(2, -1)
        if not torch.equal(first, second):
            raise Refuse(f"the table {source} does not hold each angle twice")
        columns.append(first)
    joint = torch.cat(columns, -1).to(dtype).contiguous()
    name = (
        f"rope_table_{cos.rpartition('_')[2]}_{sin.rpartition('_')[2]}"
        + "_wide" * (dtype != table.dtype)
        + "_interleaved" * interleaved
    )
    return rw.slot(name) if name in rw.weights.slots else rw.add_constant(name, joint)
