"""`linear(x, wq), linear(x, wk), linear(x, wv) = qkv(x, [wq; wk; wv])`, found from the attention's operands.

Before and after:

    q = fxbackend.linear(x, wq, bq)
    k = fxbackend.linear(x, wk, bk)             q, k, v = fxbackend.qkv(x, qkv_weight, qkv_bias, |q|, |k|, |v|)
    v = fxbackend.linear(x, wv, bv)

or, packed already (Phi-3), `p = linear(x, w); q, k, v = p[:, :a], p[:, a:b], p[:, b:]`. What lies between the linears
and the attention (norm, rope, views) does not matter: stacking rows of a projection is exact whatever follows.

Refuses: projections of different values, some with and some without bias, or whose weights are read elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, common_path, shape_of
from fxbackend.rewriter import Rewriter
from fxbackend.weights import Piece, Slot

aten = torch.ops.aten
dialect = torch.ops.fxbackend

_LINEAR = dialect.linear.default
# Where a walk back from the attention has gone too far: no projection of this attention lies behind these.
_BORDER = {dialect.attention.default, dialect.embedding.default, dialect.qkv.default, dialect.glu.default}


@dataclass(frozen=True)
class FuseQkv(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_qkv"
    stage: ClassVar[Stage] = Stage.FUSED

    def run(self, rw: Rewriter) -> None:
        """One fusion per attention."""
        for node in rw.program.calls(dialect.attention.default):
            found = [_sources(operand) for operand in node.args[:3]]  # type: ignore[arg-type]
            if unclear := [name for name, each in zip("qkv", found, strict=True) if each is None or len(each) != 1]:
                rw.refuse(node, f"{', '.join(unclear)} of this attention does not come from one linear")
                continue
            sources = [each[0] for each in found if each]
            if all(source.target is _LINEAR for source in sources):
                _fuse_separate(rw, node, sources)
            else:
                _fuse_packed(rw, node, sources)


def _sources(operand: fx.Node) -> list[fx.Node] | None:
    """The linears, or slices of linears, that an operand is computed from; None when it has other sources."""
    sources: list[fx.Node] = []
    seen, pending = {operand}, [operand]
    while pending:
        node = pending.pop()
        if node.target in _BORDER:
            return None
        if node.target is _LINEAR or _is_part(node):
            sources.append(node)
            continue
        pending += [each for each in node.all_input_nodes if each not in seen and each.op == "call_function"]
        seen.update(node.all_input_nodes)
    return sources


def _is_part(node: fx.Node) -> bool:
    """Columns of a linear."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or node.args[1] != 1:
        return False
    return node.args[0].target is _LINEAR  # type: ignore[union-attr]


def _fuse_separate(rw: Rewriter, attention: fx.Node, linears: list[fx.Node]) -> None:
    x, _weight, bias = linears[0].args
    if len(set(linears)) != 3:
        rw.refuse(attention, "two operands of this attention come from one linear")
        return
    if any(each.args[0] is not x for each in linears):
        rw.refuse(attention, "q, k and v are projections of different values")
        return
    if any((each.args[2] is None) != (bias is None) for each in linears):
        rw.refuse(attention, "some of q, k and v have a bias and some have none")
        return
    slots = [operand for each in linears for operand in each.args[1:] if operand is not None]
    if any(len(operand.users) > 1 for operand in slots):  # type: ignore[union-attr]
        rw.refuse(attention, "a weight of q, k or v is read elsewhere as well")
        return
    prefix = common_path([each.args[1] for each in linears])  # type: ignore[misc]
    with rw.at(min(linears)):
        weight = rw.stack(f"{prefix}.qkv_proj.weight", [each.args[1] for each in linears])  # type: ignore[misc]
        stacked = None if bias is None else rw.stack(f"{prefix}.qkv_proj.bias", [each.args[2] for each in linears])  # type: ignore[misc]
        new = rw.calls(dialect.qkv.default, 3, x, weight, stacked, *(shape_of(each)[1] for each in linears))
        for node in new:
            node.meta["module"] = prefix
    rw.replace(dict(zip(linears, new, strict=True)))
    rw.matched()


def _fuse_packed(rw: Rewriter, attention: fx.Node, slices: list[fx.Node]) -> None:
    if any(each.target is _LINEAR for each in slices) or len({each.args[0] for each in slices}) != 1:
        rw.refuse(attention, "q, k and v are parts of different linears")
        return
    packed = slices[0].args[0]
    ends = [0, *(each.args[3] for each in slices)]
    if [each.args[2] for each in slices] != ends[:3] or ends[3] != shape_of(packed)[1]:  # type: ignore[arg-type]
        rw.refuse(attention, "q, k and v are not the first, second and third part of their linear")
        return
    if len(packed.users) != 3 or any(len(operand.users) > 1 for operand in packed.args[1:] if operand is not None):  # type: ignore[union-attr]
        rw.refuse(attention, "the packed projection or its weight is read elsewhere as well")
        return
    sizes = tuple(int(shape_of(each)[1]) for each in slices)
    for operand in packed.args[1:]:  # type: ignore[union-attr]
        if operand is not None:
            _section(rw, rw.weights.slots[str(operand.target)], sizes)  # type: ignore[union-attr]
    with rw.at(packed):  # type: ignore[arg-type]
        new = rw.calls(dialect.qkv.default, 3, *packed.args, *sizes)  # type: ignore[union-attr]
    rw.replace(dict(zip(slices, new, strict=True)))
    rw.matched()


def _section(rw: Rewriter, slot: Slot, sizes: tuple[int, ...]) -> None:
    """States the parts of a packed slot in its recipe, so that each can be sharded by itself."""
    (piece,) = slot.pieces
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = tuple(Piece(piece.source, (0, start, size)) for start, size in zip(starts, sizes, strict=True))
    rw.weights.replace(slot.name, pieces=parts, sections=sizes)
