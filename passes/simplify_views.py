"""`transpose(transpose(x)) = x`: views that undo each other go, views of views become one.

Before and after:

    a = aten.transpose(x, 0, 1); b = aten.transpose(a, 0, 1)        (x)
    a = aten.unsqueeze(x, 0);    b = aten.squeeze(a, 0)             (x)
    a = aten.reshape(x, s);      b = aten.reshape(a, t)             b = aten.reshape(x, t)

Refuses: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, same_shape
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class SimplifyViews(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "simplify_views"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """One walk in graph order: arguments are simple already when a node is reached."""
        for node in list(rw.graph.nodes):
            if node.op != "call_function" or node._erased or not node.args or not isinstance(node.args[0], fx.Node):
                continue
            with rw.at(node):
                new = _simpler(rw, node, node.args[0])
            if new is not None:
                rw.replace({node: new})
                rw.matched()


def _simpler(rw: Rewriter, node: fx.Node, inner: fx.Node) -> fx.Node | None:
    target, first = node.target, inner.args[0] if inner.args else None
    if not isinstance(first, fx.Node):
        return inner if target is aten.reshape.default and same_shape(inner, node) else None
    if target is aten.transpose.int and inner.target is aten.transpose.int and inner.args[1:] == node.args[1:]:
        return first
    if (
        {target, inner.target} == {aten.squeeze.dim, aten.unsqueeze.default}
        and inner.args[1:] == node.args[1:]
        and same_shape(first, node)
    ):
        return first
    if target is not aten.reshape.default:
        return None
    if same_shape(inner, node):
        return inner
    if inner.target in (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim):
        return first if same_shape(first, node) else rw.call(aten.reshape.default, first, node.args[1])
    return None
