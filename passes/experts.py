"""`hf_experts(x, ids, w, w13, w2) = moe(x, ids, w, gate_up, down)`, weights as `[experts, out, in]`, gate first.

Before and after (GPT-OSS, whose weights lie transposed and its gates between the other halves):

    y = fxbackend.hf_experts(x, i, w, gate_up[E, W, 2 I], down[E, I, W], ..., True, True)
    y = fxbackend.moe(x, i, w, gate_up[E, 2 I, W], down[E, W, I], ...)

The recipe of a slot then turns what it takes from the checkpoint. Where that cannot be (a weight that is computed, read
elsewhere as well, or made of a tensor per expert) the graph turns it.

Refuses: nothing; the hook that leaves `hf_experts` refuses what is not mapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, shape_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Experts(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "experts"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """Every call by itself."""
        for node in rw.program.calls(dialect.hf_experts.default):
            x, ids, weights, gate_up, down, gate_up_bias, down_bias, *how, transposed, interleaved = node.args
            with rw.at(node):
                gate_up = _turned(rw, gate_up, bool(transposed), bool(interleaved))
                down = _turned(rw, down, bool(transposed), False)
                if gate_up_bias is not None:
                    gate_up_bias = _turned(rw, gate_up_bias, False, bool(interleaved))
                new = rw.call(dialect.moe.default, x, ids, weights, gate_up, down, gate_up_bias, down_bias, *how)
            rw.replace({node: new})
            rw.matched()


def _turned(rw: Rewriter, weight: object, transpose: bool, halves: bool) -> fx.Node:
    """The weight with its last two dimensions exchanged, then rows 0, 2, 4, ... before rows 1, 3, 5, ..."""
    assert isinstance(weight, fx.Node)
    if not transpose and not halves:
        return weight
    if weight.op == "get_attr" and len(weight.users) == 1:
        slot = rw.weights.slots[str(weight.target)]
        if len(slot.pieces) == 1 and not slot.pieces[0].transpose and not slot.folded:
            rw.turn_experts(weight, transpose, halves)
            return weight
    if transpose:
        weight = rw.call(aten.transpose.int, weight, 1, 2)
    if halves:
        count = int(shape_of(weight)[1])
        parts = [rw.call(aten.slice.Tensor, weight, 1, start, count, 2) for start in (0, 1)]
        weight = rw.call(aten.cat.default, parts, 1)
    return weight
