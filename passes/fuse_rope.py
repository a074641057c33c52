"""`attention(rope(q), rope(k), v) = attention(*rope_qk(q, k), v)`.

Before and after:

    a = fxbackend.rope(q, positions, table, i)
    b = fxbackend.rope(k, positions, table, i)      a, b = fxbackend.rope_qk(q, k, positions, table, i)
    y = fxbackend.attention(a, b, v, ...)           y = fxbackend.attention(a, b, v, ...)

Refuses: ropes over different tables, or a rotated value that is read elsewhere as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fxbackend.pass_base import Pass
from fxbackend.program import Stage
from fxbackend.rewriter import Rewriter

dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class FuseRope(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "fuse_rope"
    stage: ClassVar[Stage] = Stage.FUSED

    def run(self, rw: Rewriter) -> None:
        """One fusion per attention."""
        for attention in rw.program.calls(dialect.attention.default):
            q, k = attention.args[:2]
            if q.target is not dialect.rope.default or k.target is not dialect.rope.default:  # type: ignore[union-attr]
                continue
            if q.args[1:] != k.args[1:]:  # type: ignore[union-attr]
                rw.refuse(attention, "q and k are rotated over different tables")
                continue
            if len(q.users) > 1 or len(k.users) > 1:  # type: ignore[union-attr]
                rw.refuse(attention, "a rotated q or k is read elsewhere as well")
                continue
            with rw.at(attention):
                new = rw.calls(dialect.rope_qk.default, 2, q.args[0], k.args[0], *q.args[1:])  # type: ignore[union-attr]
            rw.replace({q: new[0], k: new[1]})  # type: ignore[dict-item]
            rw.matched()
