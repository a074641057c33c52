"""`b = empty; b[..., :n] = x; b[..., n:] = y` is `b = cat(x, y)`: filled part by part is concatenated.

Before and after (DeepSeek V3 lays the two parts of its keys into one tensor):

    b = aten.new_empty(h, [1, H, T, 48])
    s = aten.slice(b, 3, 0, 32); aten.copy_(s, x[1, H, T, 32])
    t = aten.slice(b, 3, 32); aten.copy_(t, y[1, 1, T, 16])
    a = attention(q, b, ...)                    a = attention(q, aten.cat([x, aten.expand(y, ...)], 3), ...)

Refuses (left as it is, and the check of the stage names the write): parts that overlap, leave a gap or lie along two
dimensions, a buffer or part that is read before it is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass, Refuse
from fxbackend.program import Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten

_EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)


@dataclass(frozen=True)
class FillBuffers(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fill_buffers"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """Every buffer that is made empty and then written to."""
        for node in rw.program.calls(*_EMPTY):
            parts = [user for user in node.users if _write(user) is not None]
            if not parts:
                continue
            try:
                dim, parts = _covering(node, parts)
            except Refuse as reason:
                rw.refuse(node, str(reason))
                continue
            writes = [_write(part) for part in parts]
            last = max(writes)  # type: ignore[type-var]
            with rw.at(last, origin=node):  # type: ignore[arg-type]
                sources = [_source(rw, write) for write in writes]  # type: ignore[arg-type]
                whole = sources[0] if len(sources) == 1 else rw.call(aten.cat.default, sources, dim)
            for user in list(node.users):
                if user not in parts:
                    user.replace_input_with(node, whole)
            for write, part in zip(writes, parts, strict=True):
                rw.erase(write)  # type: ignore[arg-type]
                rw.erase(part)
            rw.matched()


def _write(part: fx.Node) -> fx.Node | None:
    """The only user of a slice, if that writes to it."""
    users = list(part.users)
    if part.target is not aten.slice.Tensor or len(users) != 1 or users[0].target is not aten.copy_.default:
        return None
    return users[0] if users[0].args[0] is part and not users[0].users else None


def _covering(buffer: fx.Node, parts: list[fx.Node]) -> tuple[int, list[fx.Node]]:
    """The dimension along which the parts fill the buffer without gap, and the parts in order."""
    rank = len(shape_of(buffer))
    dims = {int(part.args[1]) % rank if len(part.args) > 1 else 0 for part in parts}  # type: ignore[arg-type]
    if len(dims) != 1:
        raise Refuse("it is filled along several dimensions")
    (dim,) = dims
    size, filled = shape_of(buffer)[dim], 0
    ordered = sorted(parts, key=_start)
    for part in ordered:
        length = shape_of(part)[dim]
        step = part.args[4] if len(part.args) > 4 else 1
        if _start(part) != filled or not isinstance(length, int) or step != 1:
            raise Refuse(f"its parts along dimension {dim} overlap or leave a gap")
        filled += length
    if not isinstance(size, int) or filled != size:
        raise Refuse(f"only {filled} of {size} along dimension {dim} are filled")
    last = max(_write(part) for part in parts)  # type: ignore[type-var]
    if any(user < last for user in buffer.users if user not in parts):  # type: ignore[operator]
        raise Refuse("it is read before it is full")
    return dim, ordered


def _start(part: fx.Node) -> int:
    start = part.args[2] if len(part.args) > 2 else 0
    return start if isinstance(start, int) and start >= 0 else -1


def _source(rw: Rewriter, write: fx.Node) -> fx.Node:
    """What is written, in the shape and dtype of the part."""
    part, source = write.args[:2]
    wanted, given = shape_of(part), shape_of(source)  # type: ignore[arg-type]
    if list(map(str, wanted)) != list(map(str, given)):
        sizes = [-1 if str(one) == str(other) else one for one, other in zip(wanted[-len(given) :], given, strict=True)]
        source = rw.call(aten.expand.default, source, [*wanted[: len(wanted) - len(given)], *sizes])
    if value_of(source).dtype != value_of(part).dtype:  # type: ignore[arg-type]
        source = rw.call(aten.to.dtype, source, value_of(part).dtype)  # type: ignore[arg-type]
    return source  # type: ignore[return-value]
