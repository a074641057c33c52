"""`f(tokens) = positions + c`: what counts the tokens of the row becomes the engine's positions.

Before and after:

    a = aten.arange(tokens)                     (positions)
    b = aten.cumsum(aten.ones([tokens]), 0)     b = aten.add(positions, 1)
    c = aten.cumsum(aten.ne(input_ids, 1), 0)   c = aten.add(positions, 1)
    d = aten.slice(zeros_1_512, 1, 0, tokens)   d = aten.full([1, tokens], 0)

Such a value is evaluated at several lengths, never matched: `arange`, a running sum of a mask of ones, and any
arithmetic on them. A count that skips padding (RoBERTa) is evaluated on ids that are no padding: an engine's batch
holds none. That batch is many sequences in one row, and counting the row would be wrong for all but the first.

Refuses: a value of the number of tokens that does not count them. The proof of row independence names what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import fx

from fxbackend.pass_base import Pass
from fxbackend.program import Evaluator, Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten
_LENGTHS = (2, 5, 9)
_CREATE = (aten.zeros.default, aten.ones.default, aten.full.default)


@dataclass(frozen=True)
class Positions(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "positions"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """One walk over what follows from the number of tokens alone, in graph order."""
        rw.sweep()  # a mask that raise_attention has read is not a place that counts tokens any more
        region = _counting(rw)
        values = [_evaluate(rw, region, length) for length in _LENGTHS]
        positions = rw.program.inputs()["positions"]
        derived = {positions}
        for node in region:
            if node._erased or any(arg in derived for arg in node.all_input_nodes):
                derived.add(node)
                continue
            if not node.users or not _is_row(node):
                continue
            offset, constant = _offset(node, values), _constant(node, values)
            if constant is not None and node.target not in _CREATE:
                with rw.at(node):
                    sizes = [size if isinstance(size, int) else rw.token_count(node) for size in shape_of(node)]
                    new = rw.call(aten.full.default, sizes, constant, dtype=value_of(node).dtype)
                rw.replace({node: new})
                rw.matched()
                continue
            if offset is None:
                continue
            with rw.at(node):
                new = positions if offset == 0 else rw.call(aten.add.Tensor, positions, offset)
                if value_of(node).dtype != torch.int64:
                    new = rw.call(aten.to.dtype, new, value_of(node).dtype)
                for _axis in range(len(shape_of(node)) - 1):
                    new = rw.call(aten.unsqueeze.default, new, 0)
            derived.add(new)
            rw.replace({node: new})
            rw.matched()


def _counting(rw: Rewriter) -> list[fx.Node]:
    """Calls that follow from the ids, their number and constants alone, without a trained weight."""
    ids = rw.program.inputs()["input_ids"]
    region: dict[fx.Node, None] = {}
    for node in rw.graph.nodes:
        if node.op != "call_function":
            continue
        if all(arg is ids or arg in region or str(arg.target) in rw.weights.constants for arg in node.all_input_nodes):
            region[node] = None
    return list(region)


def _evaluate(rw: Rewriter, region: list[fx.Node], length: int) -> dict[fx.Node, object]:
    # From the middle of the vocabulary, away from the special ids at its ends.
    vocabulary = rw.program.facts.vocab_size
    ids = torch.arange(length) * 7 % max(vocabulary // 4, 1) + vocabulary // 3
    evaluator = Evaluator(rw.graph, {"input_ids": ids, "positions": ids}, rw.weights.constants)
    values: dict[fx.Node, object] = {}
    with torch.no_grad():
        for node in region:
            for arg in node.all_input_nodes:
                if arg not in values:
                    values[arg] = evaluator.value(arg, values)
            values[node] = evaluator.value(node, values)
    return values


def _is_row(node: fx.Node) -> bool:
    """`[1..., tokens]`."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return False
    shape = shape_of(node)
    return (
        bool(shape)
        and isinstance(shape[-1], torch.SymInt)
        and all(isinstance(size, int) and size == 1 for size in shape[:-1])
    )


def _constant(node: fx.Node, values: list[dict[fx.Node, object]]) -> float | bool | None:
    """The number that every token has, at every length (token types of a buffer of zeros)."""
    found = {each.item() for known in values for each in known[node].unique()}  # type: ignore[attr-defined]
    return found.pop() if len(found) == 1 else None


def _offset(node: fx.Node, values: list[dict[fx.Node, object]]) -> int | None:
    """c where the value is `arange(tokens) + c` at every length."""
    offsets = set()
    for length, known in zip(_LENGTHS, values, strict=True):
        row = cast(torch.Tensor, known[node]).flatten().double()
        if len(row) != length or not torch.equal(row, torch.arange(length) + row[0]) or row[0] != row[0].round():
            return None
        offsets.add(int(row[0]))
    return offsets.pop() if len(offsets) == 1 else None
