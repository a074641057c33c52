"""`f(positions) = table[positions]`: values that depend on positions alone become rows of an evaluated table.

Before and after:

    a = aten.mul(aten.to(aten.unsqueeze(positions, 1), f32), inv_freq)
    c = aten.cos(aten.cat([a, a], 1))           c = aten.embedding(position_table_0, positions)

The table has `max_model_len` rows and is computed by running the model's own nodes once, so every rope type is exact.

Refuses: a value whose row depends on other positions than its own (found by evaluating a permutation).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Evaluator, Stage, shape_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class PositionTables(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "position_tables"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """Evaluates the region behind `positions` once and replaces its frontier."""
        positions = rw.program.inputs()["positions"]
        region = _region(rw, positions)
        frontier = [
            node
            for node in region
            if any(user not in region for user in node.users) and _is_table(node) and not _is_lookup(node, positions)
        ]
        if not frontier:
            return
        length = rw.program.facts.max_model_len
        straight = _evaluate(rw, region, torch.arange(length))
        turned = _evaluate(rw, region, torch.arange(length).flip(0))
        tables = 0
        for node in frontier:
            rows = straight[node].reshape(length, -1)
            if not torch.equal(rows, turned[node].reshape(length, -1).flip(0)):
                rw.refuse(node, "a row of this value depends on more than its own position")
                continue
            with rw.at(node):
                table = rw.add_constant(f"position_table_{tables}", rows.contiguous())
                new = rw.call(aten.embedding.default, table, positions)
                for axis, size in enumerate(shape_of(node)[:-1]):
                    if size == 1:
                        new = rw.call(aten.unsqueeze.default, new, axis)
            tables += 1
            rw.replace({node: new})
            rw.matched()


def _region(rw: Rewriter, positions: fx.Node) -> dict[fx.Node, None]:
    """Calls whose value follows from positions and constants alone, equal ones merged."""
    region: dict[fx.Node, None] = {}
    depends = {positions}
    seen: dict[tuple[object, str], fx.Node] = {}
    for node in list(rw.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
            continue
        if not all(arg in depends or _is_constant(rw, arg) for arg in node.all_input_nodes):
            continue
        if not any(arg in depends for arg in node.all_input_nodes):
            continue
        key = (node.target, f"{node.args} {node.kwargs}")
        if key in seen:
            rw.replace({node: seen[key]})
            continue
        seen[key] = node
        depends.add(node)
        region[node] = None
    return region


def _is_constant(rw: Rewriter, node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target) in rw.weights.constants


def _is_table(node: fx.Node) -> bool:
    """A floating `[tokens, width]`, with further dimensions of one (for the heads) in any place but the last."""
    *outer, width = shape_of(node) or (None,)
    others = [size for size in outer if not isinstance(size, torch.SymInt)]
    return (
        node.meta["val"].dtype.is_floating_point
        and isinstance(width, int)
        and len(others) + 1 == len(outer)
        and all(size == 1 for size in others)
    )


def _is_lookup(node: fx.Node, positions: fx.Node) -> bool:
    """A row of a table already, with or without axes of one."""
    while node.target is aten.unsqueeze.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.target is aten.embedding.default and node.args[1] is positions


def _evaluate(rw: Rewriter, region: dict[fx.Node, None], positions: torch.Tensor) -> dict[fx.Node, torch.Tensor]:
    plan = rw.weights
    evaluator = Evaluator(rw.graph, {"positions": positions}, plan.constants)
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for node in region:
            for arg in node.all_input_nodes:
                if arg not in values:
                    values[arg] = evaluator.value(arg, values)
            values[node] = evaluator.value(node, values)
    return {node: values[node] for node in region}  # type: ignore[misc]
