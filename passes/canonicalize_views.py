"""`view(x) = reshape(x)`: one spelling each of views, slices, splits, selections and transposes.

Before and after, where T is the number of tokens:

    a = aten.view(x, [1, 7, -1, 16])            a = aten.reshape(x, [1, T, 4, 16])
    b, c = aten.chunk(a, 2, 3)                  b = aten.slice(a, 3, 0, 8); c = aten.slice(a, 3, 8, 16)
    d = aten.select(a, 2, -1)                   d = aten.squeeze(aten.slice(a, 2, 3, 4), 2)
    e = aten.permute(a, [0, 2, 1, 3])           e = aten.transpose(a, 1, 2)
    f = aten.cat([d, g], 1)  (g is empty)       (d)

Refuses: a view whose result has two dimensions of unknown size that are not the number of tokens.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, same_shape, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
}
_SPLITS = {aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.unbind.int}


@dataclass(frozen=True)
class CanonicalizeViews(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "canonicalize_views"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """One walk in graph order; every node sees canonical arguments."""
        tokens = _tokens(rw)
        for node in list(rw.graph.nodes):
            if node.op != "call_function" or node._erased or not node.args:
                continue
            with rw.at(node):
                new = _split(rw, node) if node.target in _SPLITS else _rewrite(rw, node, tokens)
            if new is not None:
                rw.replace(new if isinstance(new, dict) else {node: new})
                rw.matched()


def _tokens(rw: Rewriter) -> fx.Node | None:
    """The node that reads the number of tokens, which canonicalize has put first."""
    ids = rw.program.inputs()["input_ids"]
    return next((node for node in ids.users if node.target is aten.sym_size.int), None)


def _rewrite(rw: Rewriter, node: fx.Node, tokens: fx.Node | None) -> fx.Node | None:
    args: Any = node.args
    target, first = node.target, args[0]
    if target is aten.cat.default:
        return _cat(rw, node)
    if not isinstance(first, fx.Node):
        return None
    if target in _VIEWS:
        return _reshape(rw, node, first, tokens)
    if target is aten.slice.Tensor:
        return _slice(rw, node, first)
    if target is aten.select.int:
        dim, index = args[1:]
        size = shape_of(first)[dim]
        if isinstance(size, int):
            index %= size
            part = first if size == 1 else rw.call(aten.slice.Tensor, first, dim, index, index + 1)
            return rw.call(aten.squeeze.dim, part, dim)
    if target in (aten.t.default, aten.numpy_T.default, aten.permute.default):
        return _transpose(rw, node, first)
    return None


def _reshape(rw: Rewriter, node: fx.Node, first: fx.Node, tokens: fx.Node | None) -> fx.Node | None:
    shape = shape_of(node)
    if same_shape(node, first):
        return first
    known = None if tokens is None else str(tokens.meta["val"])
    sizes = [size if isinstance(size, int) else tokens if str(size) == known else -1 for size in shape]
    if node.target is aten.reshape.default and node.args[1] == sizes:
        return None
    if sizes.count(-1) > 1:
        return None if node.target is aten.reshape.default else rw.call(aten.reshape.default, *node.args)
    return rw.call(aten.reshape.default, first, sizes)


def _slice(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    """`(x, dim, start, end)` with both ends inside of a known size; the step only where it is not 1."""
    args: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, end, step = args
    size = shape_of(first)[dim]
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    start = start or 0
    if start == 0 and (end is None or end == 2**63 - 1) and step == 1:
        return first
    if not isinstance(size, int):
        return None
    end = size if end is None else min(end, size)
    start, end = max(start + size * (start < 0), 0), end + size * (end < 0)
    if (start, end, step) == (0, size, 1):
        return first
    wanted = (first, dim, start, end, *([step] if step != 1 else []))
    return None if node.args == wanted else rw.call(aten.slice.Tensor, *wanted)


def _cat(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """Without empty parts (the unrotated rest of a full rope, Phi-3), and with a positive dimension."""
    args: Any = node.args
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    full = [part for part in parts if str(shape_of(part)[dim]) != "0"]
    if len(full) == 1 and value_of(full[0]).dtype == value_of(node).dtype:
        return full[0]
    if len(full) == len(parts) and args[1:] == (dim,):
        return None
    return rw.call(aten.cat.default, full, dim)


def _split(rw: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    target, args = cast(torch._ops.OpOverload, node.target), cast(Any, node.args)
    given = {argument.name: value for argument, value in zip(target._schema.arguments, args, strict=False)}
    dim = given.get("dim", 0)
    unbound = node.target is aten.unbind.int
    sizes = [1] * len(node.meta["val"]) if unbound else [value.shape[dim] for value in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes) or {user.target for user in node.users} != {operator.getitem}:
        return None
    replacements = {}
    for user in node.users:
        index = cast(int, user.args[1]) % len(sizes)
        start = sum(sizes[:index])
        part = rw.call(aten.slice.Tensor, args[0], dim, start, start + sizes[index])
        replacements[user] = rw.call(aten.squeeze.dim, part, dim) if unbound else part
    return replacements


def _transpose(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    rank = len(shape_of(first))
    args: Any = node.args
    order = [dim % rank for dim in args[1]] if len(args) > 1 else list(reversed(range(rank)))
    moved = [index for index, dim in enumerate(order) if index != dim]
    if not moved:
        return first
    return rw.call(aten.transpose.int, first, moved[0], moved[1]) if len(moved) == 2 else None
