"""`x.add_(y) = x'` with `x' = x + y`, read by all who read x later: no op writes to its operand any more.

Before and after:

    a = aten.div_.Tensor(s, 8.0)                a = aten.div.Tensor(s, 8.0)
    b = aten.softmax.int(s, 3)                  b = aten.softmax.int(a, 3)

Which values share memory is read off the storages of the captured values.

Refuses: a write to a weight or an input; a write that a view made before it would show later; a write without a
functional form. The check of the stage then names the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Stage, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class Functionalize(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "functionalize"
    stage: ClassVar[Stage] = Stage.CANONICAL

    def run(self, rw: Rewriter) -> None:
        """One walk in graph order; a value that was written to is its last writer's from there on."""
        memory = {node: _storage(node) for node in rw.graph.nodes}
        for node in list(rw.graph.nodes):
            if not _writes(node):
                continue
            written = cast(fx.Node, node.args[0])
            functional = _functional(node.target)
            reason = "it has no functional form" if functional is None else _shown(node, written, memory)
            if functional is None or reason:
                rw.refuse(node, reason)
                continue
            with rw.at(node):
                new = rw.call(functional, *node.args, **node.kwargs)
                if value_of(new).dtype != value_of(written).dtype:
                    new = rw.call(aten.to.dtype, new, value_of(written).dtype)
            memory[new] = memory[node]
            rw.replace_after(written, new, node)
            rw.replace({node: new})
            rw.erase(node)
            rw.matched()


def _writes(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable or not node.args:
        return False
    return isinstance(node.args[0], fx.Node)


def _functional(target: object) -> torch._ops.OpOverload | None:
    """`aten.add.Tensor` for `aten.add_.Tensor`."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not name.endswith("_") or name.startswith("_"):
        return None
    return getattr(getattr(aten, name[:-1], None), overload, None)


def _storage(node: fx.Node) -> object:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _shown(node: fx.Node, written: fx.Node, memory: dict[fx.Node, object]) -> str:
    """Why the write must not become a value of its own; empty when it may."""
    for other, storage in memory.items():
        if other._erased or storage is None or storage != memory[written]:
            continue
        if other.op in ("placeholder", "get_attr"):
            return f"it writes to {other.target}"
        if other is not written and other < node and any(node < user for user in other.users):
            return f"{other.name} shares the memory that it writes to and is read later"
    return ""
