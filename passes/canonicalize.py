"""`f(no-op(x)) = f(x)`: one spelling each of views, casts, scalars and sizes, and nothing that computes nothing.

Before and after:

    a = aten.view(x, [1, n, -1, 16])            a = aten.reshape(x, [1, tokens, 4, 16])
    b, c = aten.chunk(a, 2, -1)                 b = aten.slice(a, 3, 0, 8); c = aten.slice(a, 3, 8, 16)
    d = aten.to(b, f32)      (b is f32)         (b)
    e = aten.mul(c, 1.0)                        (c)

Refuses: nothing; a dropout in training mode is left, and the stage's check names it.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten

_IDENTITY = {aten.detach.default, aten.alias.default, aten.contiguous.default, aten.clone.default,
             aten.lift_fresh.default}
_CASTS = {aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default,
          aten.type_as.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.flatten.using_ints,
          aten.unflatten.int, aten.view_as.default}
_SPLITS = {aten.chunk.default, aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.unbind.int}
_SCALARS = {aten.mul.Scalar: aten.mul.Tensor, aten.add.Scalar: aten.add.Tensor, aten.sub.Scalar: aten.sub.Tensor,
            aten.div.Scalar: aten.div.Tensor}
_DIMS = ("dim", "dim0", "dim1")


@dataclass(frozen=True)
class Canonicalize(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "canonicalize"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """One walk in graph order; every node sees canonical arguments."""
        tokens = _tokens(rw)
        for node in list(rw.graph.nodes):
            if node.op != "call_function" or node._erased or node is tokens:
                continue
            if node.target is torch._C._set_grad_enabled:
                rw.erase(node)
                rw.matched()
                continue
            with rw.at(node):
                new = _rewrite(rw, node, tokens)
            if new is not None:
                rw.replace(new)
                rw.matched()


def _tokens(rw: Rewriter) -> fx.Node:
    """The one node that reads the number of tokens."""
    ids = rw.program.inputs()["input_ids"]
    dim = len(shape_of(ids)) - 1
    for node in ids.users:
        if node.target is aten.sym_size.int and node.args == (ids, dim) and node is _first_call(rw):
            return node
    with rw.at(_first_call(rw)):
        return rw.call(aten.sym_size.int, ids, dim)


def _first_call(rw: Rewriter) -> fx.Node:
    return next(node for node in rw.graph.nodes if node.op == "call_function")


def _rewrite(rw: Rewriter, node: fx.Node, tokens: fx.Node) -> dict[fx.Node, fx.Node] | None:
    target = node.target
    if target is aten.sym_size.int and str(node.meta["val"]) == str(tokens.meta["val"]):
        return {node: tokens}
    if target in _SPLITS:
        return _split(rw, node)
    new = _one(rw, node, tokens)
    return None if new is None else {node: new}


def _one(rw: Rewriter, node: fx.Node, tokens: fx.Node) -> fx.Node | None:
    target, args = node.target, node.args
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    if first is not None and (target in _IDENTITY or (target is aten.dropout.default and not args[2])):
        return first
    if target in _CASTS and first is not None:
        return _cast(rw, node, first)
    if target in _VIEWS and first is not None:
        return _reshape(rw, node, first, tokens)
    if target is aten.slice.Tensor and first is not None:
        return _slice(rw, node, first)
    if target is aten.select.int and first is not None:
        dim, index = _positive(node, int(args[1])), int(args[2])  # type: ignore[arg-type]
        size = shape_of(first)[dim]
        if isinstance(size, int):
            index %= size
            return rw.call(aten.squeeze.dim, rw.call(aten.slice.Tensor, first, dim, index, index + 1), dim)
    if target is aten.cat.default:
        return _cat(rw, node)
    if target in (aten.t.default, aten.numpy_T.default, aten.permute.default) and first is not None:
        return _transpose(rw, node, first)
    if target in (aten.expand.default, aten.expand_as.default) and shape_of(node) == shape_of(first):  # type: ignore[arg-type]
        return first
    if target in _SCALARS:
        return rw.call(_SCALARS[target], *args, **node.kwargs)  # type: ignore[index]
    if target in (aten.square.default,) or (target is aten.mul.Tensor and args[0] is args[1]):
        return rw.call(aten.pow.Tensor_Scalar, first, 2)
    if target in (aten.mul.Tensor, aten.div.Tensor) and _is_number(args[1], 1) and value_of(node).dtype == _dtype(first):
        return first
    if target in (aten.add.Tensor, aten.sub.Tensor) and _is_number(args[1], 0) and value_of(node).dtype == _dtype(first):
        return first
    return _dims(rw, node)


def _is_number(value: object, expected: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == expected


def _dtype(node: object) -> torch.dtype | None:
    return value_of(node).dtype if isinstance(node, fx.Node) else None


def _cast(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    wanted = value_of(node).dtype
    if wanted == value_of(first).dtype:
        return first
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return rw.call(aten.to.dtype, first, wanted)


def _reshape(rw: Rewriter, node: fx.Node, first: fx.Node, tokens: fx.Node) -> fx.Node | None:
    shape = shape_of(node)
    if shape == shape_of(first):
        return first
    sizes = [size if isinstance(size, int) else tokens if str(size) == str(tokens.meta["val"]) else -1 for size in shape]
    if node.target is aten.reshape.default and node.args[1] == sizes:
        return None
    if sizes.count(-1) > 1:
        return None if node.target is aten.reshape.default else rw.call(aten.reshape.default, *node.args)
    return rw.call(aten.reshape.default, first, sizes)


def _slice(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    """`(x, dim, start, end)` with both ends inside of a known size; the step only where it is not 1."""
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])
    dim = _positive(node, int(dim))  # type: ignore[arg-type]
    size = shape_of(first)[dim]
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    start = int(start or 0)  # type: ignore[arg-type]
    if start == 0 and (end is None or end == 2**63 - 1) and step == 1:
        return first
    if not isinstance(size, int):
        return None
    end = size if end is None else min(int(end), size)  # type: ignore[arg-type]
    start, end = start + size * (start < 0), end + size * (end < 0)
    if (start, end, step) == (0, size, 1):
        return first
    wanted = (first, dim, start, end, *([step] if step != 1 else []))
    return None if node.args == wanted else rw.call(aten.slice.Tensor, *wanted)


def _cat(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """Without empty parts (the unrotated rest of a full rope, Phi-3), and with a positive dimension."""
    parts, dim = node.args[0], _positive(node, int(node.args[1]) if len(node.args) > 1 else 0)  # type: ignore[arg-type]
    full = [part for part in parts if shape_of(part)[dim] != 0]  # type: ignore[union-attr]
    if len(full) == 1 and value_of(full[0]).dtype == value_of(node).dtype:
        return full[0]
    if len(full) == len(parts) and node.args[1:] == (dim,):  # type: ignore[arg-type]
        return None
    return rw.call(aten.cat.default, full, dim)


def _split(rw: Rewriter, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
    first = node.args[0]
    dim = 0
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):  # type: ignore[union-attr]
        if argument.name == "dim":
            dim = int(value)  # type: ignore[arg-type]
    dim = _positive(node, dim)
    unbound = node.target is aten.unbind.int
    sizes = [1] * len(node.meta["val"]) if unbound else [value.shape[dim] for value in node.meta["val"]]
    if not all(isinstance(size, int) for size in sizes) or any(user.target is not operator.getitem for user in node.users):
        return None
    replacements = {}
    for user in node.users:
        index = int(user.args[1]) % len(sizes)  # type: ignore[arg-type]
        start = sum(sizes[:index])
        part = rw.call(aten.slice.Tensor, first, dim, start, start + sizes[index])
        replacements[user] = rw.call(aten.squeeze.dim, part, dim) if unbound else part
    return replacements


def _transpose(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    rank = len(shape_of(first))
    order = [d % rank for d in node.args[1]] if len(node.args) > 1 else list(reversed(range(rank)))  # type: ignore[attr-defined]
    moved = [index for index, dim in enumerate(order) if index != dim]
    if not moved:
        return first
    return rw.call(aten.transpose.int, first, moved[0], moved[1]) if len(moved) == 2 else None


def _positive(node: fx.Node, dim: int) -> int:
    first = node.args[0]
    rank = len(shape_of(first[0] if isinstance(first, (list, tuple)) else first))  # type: ignore[arg-type]
    return dim % (rank + (node.target in (aten.unsqueeze.default, aten.stack.default)))


def _dims(rw: Rewriter, node: fx.Node) -> fx.Node | None:
    """Negative dimensions become positive."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten" or not node.args:
        return None
    args = list(node.args)
    for index, argument in enumerate(node.target._schema.arguments[: len(args)]):
        if argument.name not in _DIMS:
            continue
        value = args[index]
        if isinstance(value, int):
            args[index] = _positive(node, value)
        elif isinstance(value, (list, tuple)):
            args[index] = [_positive(node, each) for each in value]
    if node.target is aten.transpose.int and args[1] > args[2]:  # type: ignore[operator]
        args[1], args[2] = args[2], args[1]
    return None if _same(args, node.args) else rw.call(node.target, *args, **node.kwargs)


def _same(left: object, right: object) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right):
        return True
    return left is right or (type(left) is type(right) and left == right)
