"""Which buffers a kernel may write into: the proof that nothing else reads an operand, or the memory behind it.

A value's *root* is the call that made its memory. Views share the root of what they view; the results of the two
in-place kernels count as views of their operands, whether or not they will be, and so does a reduction over ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

aten = torch.ops.aten
dialect = torch.ops.fxbackend

# Results of these share the memory of their operands, in order (the operand of result i stands at index i).
_WRITERS: tuple[object, ...] = (dialect.rope.default, dialect.rope_qk.default, dialect.add_rms_norm.default)
# Views in which two elements may be one: a write would be seen twice.
_OVERLAPPING: tuple[object, ...] = (aten.expand.default, aten.as_strided.default)


def exclusive(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether `node` may write into `operands`: each has memory of its own that no call behind `node` reads."""
    roots = [_root(operand) for operand in operands]
    if None in roots or len(set(roots)) < len(roots):
        return False
    return all(_unread_behind(root, node) for root in roots)  # type: ignore[arg-type]


def _root(node: fx.Node) -> fx.Node | None:
    """The call that made the memory of a value; None when it is not the program's to write into."""
    while True:
        viewed = _viewed(node)
        if viewed is None:
            return node if node.op == "call_function" and node.target not in _OVERLAPPING else None
        if node.target in _OVERLAPPING:
            return None
        node = viewed


def _viewed(node: fx.Node) -> fx.Node | None:
    """What `node` is a view of, None when it has memory of its own (or of the caller)."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        whole: fx.Node = node.args[0]  # type: ignore[assignment]
        if whole.target is dialect.qkv.default:
            return None  # q, k and v lie in one buffer and share no element of it
        return whole.args[int(node.args[1])] if whole.target in _WRITERS else whole  # type: ignore[arg-type, return-value]
    if node.target in (dialect.all_reduce.default, *_WRITERS):
        return node.args[0]  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(each.alias_info is not None for each in schema.returns):
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    return None


def _unread_behind(root: fx.Node, point: fx.Node) -> bool:
    """Whether no value in `root`'s memory that exists before `point` is read after it."""
    pending, seen = [root], {root}
    while pending:
        value = pending.pop()
        for user in value.users:
            if user.op == "output" or user > point:
                return False
            if user < point and user not in seen and _views(user, value):
                seen.add(user)
                pending.append(user)
    return True


def _views(user: fx.Node, value: fx.Node) -> bool:
    """Whether `user`, which reads `value`, shares its memory (of a tuple each result is taken to)."""
    if user.target in _WRITERS:
        return True
    if user.target is operator.getitem:
        return value.target is not dialect.qkv.default
    return _viewed(user) is value
