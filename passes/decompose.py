"""`baddbmm(b, x, y) = beta b + alpha (x @ y)`: one op that does several things becomes the ops that do one.

Before and after (Bloom and GPT-NeoX-Japanese add their bias in the product):

                                                p = aten.bmm(q, k)
    s = aten.baddbmm(b, q, k, alpha=0.25)       s = aten.add.Tensor(b, aten.mul.Tensor(p, 0.25))

Refuses: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class Decompose(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "decompose"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """Every such op, in graph order."""
        for node in rw.program.calls(aten.baddbmm.default):
            with rw.at(node):
                rw.replace({node: _baddbmm(rw, node)})
            rw.matched()


def _baddbmm(rw: Rewriter, node: fx.Node) -> fx.Node:
    added, one, two = node.args
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    product = rw.call(aten.bmm.default, one, two)
    if alpha != 1:
        product = rw.call(aten.mul.Tensor, product, alpha)
    if beta == 0:  # the op does not even read what it would add
        return product
    return rw.call(aten.add.Tensor, added if beta == 1 else rw.call(aten.mul.Tensor, added, beta), product)
