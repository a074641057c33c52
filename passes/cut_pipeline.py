"""`h = stage_cut(h)` where the fewest values live between the last attention of a stage and the first of the next.

Before and after, between layers 1 and 2 of a Llama:

    y, s = fxbackend.add_rms_norm(d, r, w, ...)         y, s = fxbackend.add_rms_norm(d, r, w, ...)
                                                        y' = fxbackend.stage_cut(y, 0); s' = fxbackend.stage_cut(s, 0)
    q, k, v = fxbackend.qkv(y, ...)                     q, k, v = fxbackend.qkv(y', ...)

Values that follow from positions alone are computed again in each stage that needs them. The place is found by
liveness, whatever the module tree looks like; of equally narrow places the last is taken.

Raises: no place between two layers where all live values are one row per token.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.errors import PipelineError, UnsupportedModelError
from fxbackend.pass_base import Pass
from fxbackend.program import Stage, shape_of
from fxbackend.rewriter import Rewriter

dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class CutPipeline(Pass):
    """See the module's docstring.

    Attributes:
        layers: how many attentions each pipeline stage holds, in order; one entry (or none) makes no cut.
    """

    name: ClassVar[str] = "cut_pipeline"
    stage: ClassVar[Stage] = Stage.PARALLEL
    layers: tuple[int, ...] = ()

    def run(self, rw: Rewriter) -> None:
        """Cuts before the first attention of every stage but the first."""
        if len(self.layers) < 2:
            return
        attentions = rw.program.calls(dialect.attention.default)
        if sum(self.layers) != len(attentions) or min(self.layers) < 1:
            raise PipelineError(
                f"pipeline stages of {self.layers} layers do not hold the {len(attentions)} attentions of "
                "this model, at least one each."
            )
        start = 0
        for index, count in enumerate(self.layers[:-1]):
            start += count
            _cut(rw, index, attentions[start - 1], attentions[start])
            rw.matched()


def _cut(rw: Rewriter, index: int, last: fx.Node, first: fx.Node) -> None:
    moving = rw.program.made_of_ids()
    nodes = list(rw.graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    final = {node: max(order[user] for user in node.users) for node in moving if node.users}
    best: tuple[int, int, list[fx.Node]] | None = None
    for place in range(order[last], order[first]):
        live = [node for node in final if order[node] <= place < final[node]]
        width = _width(live)
        if width is not None and (best is None or width <= best[0]):
            best = (width, place, live)
    if best is None:
        raise UnsupportedModelError(
            f"between {last.name} ({last.meta['module']}) and {first.name} "
            f"({first.meta['module']}) there is no place to cut a pipeline: at each, a value that "
            "is not one row per token is alive."
        )
    _, place, live = best
    following = nodes[place + 1]
    for node in sorted(live):
        with rw.at(following, origin=node):
            rw.reroute_after(node, rw.call(dialect.stage_cut.default, node, index))


def _width(live: list[fx.Node]) -> int | None:
    """Elements per token of all live values; None when one is not a row per token."""
    total = 0
    for node in live:
        shape = shape_of(node) if isinstance(node.meta["val"], torch.Tensor) else ()
        if not shape or not isinstance(shape[0], torch.SymInt):
            return None
        sizes = [size for size in shape[1:] if isinstance(size, int)]
        if len(sizes) < len(shape) - 1 or any(user.target is operator.getitem for user in node.users):
            return None
        total += int(torch.Size(sizes).numel())
    return total
