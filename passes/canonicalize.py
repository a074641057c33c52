"""`f(no-op(x)) = f(x)`: one spelling each of casts, scalars, sizes and dimensions, and nothing that computes nothing.

Before and after:

    d = aten.to.dtype_layout(b, dtype=f32)      d = aten.to.dtype(b, f32)
    d = aten.to.dtype(b, f32)   (b is f32)      (b)
    e = aten.mul.Scalar(c, 1.0)                 (c)
    f = aten.mul.Tensor(e, e)                   f = aten.pow.Tensor_Scalar(e, 2)
    g = aten.mean.dim(f, [-1], True)            g = aten.mean.dim(f, [1], True)

Views have a pass of their own, `canonicalize_views`.

Refuses: nothing; a dropout in training mode is left, and the stage's check names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, same_shape, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten

_IDENTITY = {
    aten.detach.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh.default,
}
_CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
}
_SCALARS = {
    aten.mul.Scalar: aten.mul.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
_NEUTRAL = {aten.mul.Tensor: 1, aten.div.Tensor: 1, aten.add.Tensor: 0, aten.sub.Tensor: 0}
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
                rw.replace({node: new})
                rw.matched()


def _tokens(rw: Rewriter) -> fx.Node | None:
    """The one node that reads the number of tokens, in front of all calls; None when nothing reads it."""
    ids = rw.program.inputs()["input_ids"]
    dim = len(shape_of(ids)) - 1
    first = next((node for node in rw.graph.nodes if node.op == "call_function"), None)
    if first is None or not any(_is_tokens(node, ids) for node in rw.graph.nodes):
        return None
    if first.target is aten.sym_size.int and first.args == (ids, dim):
        return first
    with rw.at(first):
        return rw.call(aten.sym_size.int, ids, dim)


def _is_tokens(node: fx.Node, ids: fx.Node) -> bool:
    return node.target is aten.sym_size.int and str(node.meta["val"]) == str(shape_of(ids)[-1])


def _rewrite(rw: Rewriter, node: fx.Node, tokens: fx.Node | None) -> fx.Node | None:
    target, args = node.target, node.args
    if _is_tokens(node, rw.program.inputs()["input_ids"]):
        return tokens
    first = args[0] if args and isinstance(args[0], fx.Node) else None
    if first is not None and (target in _IDENTITY or (target is aten.dropout.default and not args[2])):
        return first
    if target in _CASTS and first is not None:
        return _cast(rw, node, first)
    if target in (aten.expand.default, aten.expand_as.default) and first is not None and same_shape(node, first):
        return first
    if target is aten.concat.default:  # Phimoe's router
        return rw.call(aten.cat.default, args[0], _positive(node, args[1] if len(args) > 1 else 0))  # type: ignore[arg-type]
    if target in _SCALARS:
        return rw.call(_SCALARS[target], *args, **node.kwargs)
    if target in (aten.square.default,) or (target is aten.mul.Tensor and args[0] is args[1]):
        return rw.call(aten.pow.Tensor_Scalar, first, 2)
    if (
        first is not None
        and target in _NEUTRAL
        and not isinstance(args[1], (fx.Node, bool))
        and args[1] == _NEUTRAL[target]
        and value_of(node).dtype == value_of(first).dtype
    ):
        return first
    return _dims(rw, node)


def _cast(rw: Rewriter, node: fx.Node, first: fx.Node) -> fx.Node | None:
    wanted = value_of(node).dtype
    if wanted == value_of(first).dtype:
        return first
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return rw.call(aten.to.dtype, first, wanted)


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
