"""`aten.embedding(w, input_ids) = embedding(input_ids, w)`, and the last linear is `lm_head(x, w, bias)`.

Before and after:

    h = aten.embedding(w, input_ids)            h = fxbackend.embedding(input_ids, w)
    y = fxbackend.linear(x, w2, b) * 0.25       y = fxbackend.lm_head(x, w2, b) * 0.25

The head is the one linear behind the output; the arithmetic after it (multiplier, division, cap, slice) is kept. A
scaled embedding keeps its multiplication. A tied head reads the embedding's slot.

Raises: no linear behind the output, or values of the body that flow around it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.errors import UnsupportedModelError
from fxbackend.pass_base import Pass
from fxbackend.program import Stage, module_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Vocabulary(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "vocabulary"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """The embedding of the input ids, then the head."""
        ids = rw.program.inputs()["input_ids"]
        for node in rw.program.calls(aten.embedding.default):
            weight = node.args[0]
            # padding_idx, scale_grad_by_freq and sparse (arguments 2 to 4) concern the gradient only.
            if node.args[1] is ids and isinstance(weight, fx.Node) and weight.op == "get_attr":
                with rw.at(node):
                    rw.replace({node: rw.call(dialect.embedding.default, ids, weight)})
                rw.matched()
        head = _head(rw)
        if head is not None:
            with rw.at(head):
                rw.replace({head: rw.call(dialect.lm_head.default, *head.args)})
            rw.matched()


def _head(rw: Rewriter) -> fx.Node | None:
    """The linear behind the output; None when it is an `lm_head` already."""
    tail, pending = set(), [rw.program.output()]
    found: list[fx.Node] = []
    while pending:
        node = pending.pop()
        if node in tail:
            continue
        tail.add(node)
        if node.target is dialect.lm_head.default:
            return None
        if node.target is dialect.linear.default:
            found.append(node)
            continue
        if node.op == "placeholder":
            raise UnsupportedModelError(f"the output depends on {node.name} by a way around the language-model head.")
        pending += node.all_input_nodes
    if len(found) != 1:
        places = ", ".join(f"{node.name} ({module_of(node)})" for node in found) or "none"
        raise UnsupportedModelError(
            f"the output has {len(found)} linears behind it ({places}); exactly one must be the language-model head."
        )
    return found[0]
