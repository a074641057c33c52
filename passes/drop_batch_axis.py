"""`f(x[None])[0] = f'(x)`: the batch axis of one goes; values become `[tokens, ...]`.

Before and after:

    input_ids [1, T]; h [1, T, W]               input_ids [T]; h [T, W]
    q = aten.transpose(h4, 1, 2)                q = aten.transpose(h3, 0, 1)

An op without a rule gets its axis back for the length of that op (unsqueeze before, squeeze after), which is always
right; a rule only makes the graph smaller.

Refuses: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, shape_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten

_REDUCTIONS = {
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.var.correction,
    aten.softmax.int,
    aten._softmax.default,
    aten.cumsum.default,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.log_softmax.int,
    aten.var.dim,
}
_LISTS = {aten.cat.default, aten.stack.default}


@dataclass(frozen=True)
class DropBatchAxis(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "drop_batch_axis"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """Rebuilds every value that has the axis, in graph order."""
        if any(len(shape_of(node)) == 1 for node in rw.program.inputs().values()):
            return
        squeezed: dict[fx.Node, fx.Node] = {}
        for node in rw.program.inputs().values():
            with rw.program.fake_mode:
                node.meta["val"] = torch.empty(
                    node.meta["val"].shape[1:], dtype=torch.int64, device=node.meta["val"].device
                )
            squeezed[node] = node
        for node in list(rw.graph.nodes):
            if node.op == "call_function" and any(arg in squeezed for arg in node.all_input_nodes):
                with rw.at(node):
                    _convert(rw, node, squeezed)
                rw.matched()
        out = rw.program.output()
        final = squeezed.get(out, out)
        rw.replace({out: final})


def _convert(rw: Rewriter, node: fx.Node, squeezed: dict[fx.Node, fx.Node]) -> None:
    value = node.meta["val"]
    if node.target is aten.sym_size.int and node.args[1] != 0 and _lost(node.args[0], squeezed):
        squeezed[node] = rw.call(aten.sym_size.int, squeezed[cast(fx.Node, node.args[0])], cast(int, node.args[1]) - 1)
        return
    dropped = isinstance(value, torch.Tensor) and value.ndim > 0 and str(value.shape[0]) == "1"
    new = _rule(rw, node, squeezed) if dropped else None
    if new is None:

        def restore(arg: fx.Node) -> fx.Node:
            if arg not in squeezed:
                return arg
            known = squeezed[arg]
            if not isinstance(arg.meta["val"], torch.Tensor) or known.meta["val"].ndim == arg.meta["val"].ndim:
                return known if arg.op != "placeholder" else rw.call(aten.unsqueeze.default, known, 0)
            return rw.call(aten.unsqueeze.default, known, 0)

        args, kwargs = cast(Any, fx.node.map_arg(cast(Any, (node.args, node.kwargs)), restore))
        new = rw.call(cast(Any, node.target), *args, **kwargs)
        if dropped:
            new = rw.call(aten.squeeze.dim, new, 0)
    squeezed[node] = new


def _rule(rw: Rewriter, node: fx.Node, squeezed: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The node on values without the axis; None when no rule is sure."""
    target: Any = node.target
    args: Any = node.args
    kwargs: Any = node.kwargs
    rank = len(shape_of(node))

    def lost(value: object) -> bool:
        return _lost(value, squeezed)

    def small(value: object) -> object:
        return squeezed.get(value, value) if isinstance(value, fx.Node) else value

    if torch.Tag.pointwise in getattr(target, "tags", ()) or target is aten.to.dtype:
        return _pointwise(rw, node, squeezed, rank)
    if target in _LISTS and len(args) > 1 and args[1] != 0 and all(map(lost, args[0])):
        return rw.call(target, [small(item) for item in args[0]], args[1] - 1)
    if target is aten.embedding.default and lost(args[1]) and args[0] not in squeezed:
        return rw.call(target, args[0], small(args[1]), *args[2:])
    if not lost(args[0]):
        return None
    first = small(args[0])
    if target in (aten.reshape.default, aten.expand.default) and args[1][0] == 1 and not kwargs:
        return rw.call(target, first, [small(size) for size in args[1][1:]])
    if target is aten.transpose.int and 0 not in args[1:]:
        return rw.call(target, first, args[1] - 1, args[2] - 1)
    if target is aten.unsqueeze.default:
        return rw.call(target, first, max(args[1] - 1, 0))
    if target is aten.repeat_interleave.self_int and len(args) > 2 and args[2] != 0:
        return rw.call(target, first, args[1], args[2] - 1, **kwargs)
    if target in _REDUCTIONS and len(args) > 1:
        several = isinstance(args[1], (list, tuple))
        dims = list(args[1]) if several else [args[1]]
        if dims and all(isinstance(dim, int) and dim > 0 for dim in dims):
            moved = [dim - 1 for dim in dims]
            return rw.call(target, first, moved if several else moved[0], *map(small, args[2:]), **kwargs)
    if target is aten.matmul.default and lost(args[1]) and len(shape_of(args[0])) == len(shape_of(args[1])):
        return rw.call(target, first, small(args[1]))
    if target is aten.linear.default and rank > 2 and not any(arg in squeezed for arg in args[1:]):
        return rw.call(target, first, *args[1:])
    if target is aten.layer_norm.default and rank > len(args[1]):
        return rw.call(target, first, *args[1:], **kwargs)
    return None


def _lost(value: object, squeezed: dict[fx.Node, fx.Node]) -> bool:
    """Whether a value had an axis of one in front, and its small form stands without."""
    if not isinstance(value, fx.Node) or value not in squeezed or not isinstance(value.meta["val"], torch.Tensor):
        return False
    return value.op == "placeholder" or len(shape_of(squeezed[value])) < len(shape_of(value))


def _pointwise(rw: Rewriter, node: fx.Node, squeezed: dict[fx.Node, fx.Node], rank: int) -> fx.Node | None:
    args: list[object] = []
    for arg in node.args:
        if not isinstance(arg, fx.Node) or not isinstance(arg.meta["val"], torch.Tensor):
            args.append(squeezed.get(arg, arg) if isinstance(arg, fx.Node) else arg)
        elif arg in squeezed and squeezed[arg].meta["val"].ndim < max(rank, 1):
            args.append(squeezed[arg])
        elif arg not in squeezed and arg.meta["val"].ndim < rank:
            args.append(arg)
        elif arg not in squeezed and arg.meta["val"].shape[0] == 1:
            args.append(rw.call(aten.squeeze.dim, arg, 0))
        else:
            return None
    return rw.call(cast(Any, node.target), *args, **node.kwargs)
