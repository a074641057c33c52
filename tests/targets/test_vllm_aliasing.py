"""In-place kernels write only where nothing else reads: one graph per way to be wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

import fxbackend.ops  # noqa: F401  (registers the dialect)
from fxbackend.targets.vllm.aliasing import exclusive

aten = torch.ops.aten
dialect = torch.ops.fxbackend


class Block:
    """Builds `y, s = add_rms_norm(linear(x), r)` and what stands around it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.w = self.graph.get_attr("w")

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]

    def linear(self) -> fx.Node:
        return self.call(dialect.linear.default, self.x, self.w, None)

    def add_norm(self, x: fx.Node, residual: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        node = self.call(dialect.add_rms_norm.default, x, residual, self.w, 1e-6, 0.0, "before")
        return node, self.call(operator.getitem, node, 0), self.call(operator.getitem, node, 1)


def test_two_fresh_values() -> None:
    block = Block()
    x, residual = block.linear(), block.linear()
    node, y, _ = block.add_norm(x, residual)
    block.graph.output(y)
    assert exclusive(node, (x, residual))


def test_a_residual_stream_hands_its_memory_on() -> None:
    block = Block()
    first, _, total = block.add_norm(block.linear(), block.linear())
    x = block.linear()
    second, y, end = block.add_norm(x, total)
    block.graph.output((y, end))
    assert exclusive(first, first.args[:2])
    assert exclusive(second, (x, total))


def test_reads_before_do_not_matter() -> None:
    block = Block()
    x, residual = block.linear(), block.linear()
    block.call(dialect.rms_norm.default, residual, block.w, 1e-6, 0.0, "before")
    node, y, _ = block.add_norm(x, residual)
    block.graph.output(y)
    assert exclusive(node, (x, residual))


@pytest.mark.parametrize(
    "reader",
    [
        lambda block, value: block.call(aten.neg.default, value),
        lambda block, value: block.call(aten.neg.default, block.call(aten.reshape.default, value, [-1])),
    ],
    ids=["itself", "a view made later"],
)
def test_an_operand_that_is_read_later(reader: Callable[[Block, fx.Node], fx.Node]) -> None:
    for index in (0, 1):
        block = Block()
        operands = (block.linear(), block.linear())
        node, y, _ = block.add_norm(*operands)
        block.graph.output((y, reader(block, operands[index])))
        assert not exclusive(node, operands)


def test_a_view_made_earlier_and_read_later() -> None:
    block = Block()
    x, residual = block.linear(), block.linear()
    view = block.call(aten.transpose.int, block.call(aten.reshape.default, residual, [-1]), 0, 0)
    node, y, _ = block.add_norm(x, residual)
    block.graph.output((y, block.call(aten.neg.default, view)))
    assert not exclusive(node, (x, residual))


def test_an_operand_that_leaves_the_graph() -> None:
    block = Block()
    x, residual = block.linear(), block.linear()
    node, y, _ = block.add_norm(x, residual)
    block.graph.output((y, residual))
    assert not exclusive(node, (x, residual))


def test_memory_that_is_not_the_programs() -> None:
    block = Block()
    x = block.linear()
    node, y, _ = block.add_norm(x, block.x)
    other, z, _ = block.add_norm(block.linear(), block.call(aten.expand.default, block.w, [3, 4]))
    block.graph.output((y, z))
    assert not exclusive(node, (x, block.x))
    assert not exclusive(other, other.args[:2])


def test_two_operands_in_one_memory() -> None:
    block = Block()
    x = block.linear()
    node, y, _ = block.add_norm(x, block.call(aten.reshape.default, x, [-1]))
    block.graph.output(y)
    assert not exclusive(node, node.args[:2])


def test_a_reduction_may_be_done_in_place() -> None:
    block = Block()
    x, residual = block.linear(), block.linear()
    total = block.call(dialect.all_reduce.default, x)
    node, y, _ = block.add_norm(total, residual)
    block.graph.output((y, block.call(aten.neg.default, x)))
    assert not exclusive(node, (total, residual))


@pytest.mark.parametrize("again", [None, 0, 1, 2])
def test_rope_writes_q_and_k_beside_v(again: int | None) -> None:
    block = Block()
    qkv = block.call(dialect.qkv.default, block.x, block.w, None, 4, 4, 4)
    parts = [block.call(operator.getitem, qkv, index) for index in range(3)]
    q, k, v = (block.call(aten.reshape.default, part, [-1, 1, 4]) for part in parts)
    rope = block.call(dialect.rope_qk.default, q, k, block.x, block.w, False)
    turned = [block.call(operator.getitem, rope, index) for index in range(2)]
    out = [block.call(dialect.attention.default, *turned, v, None, 1.0, 0, 0.0)]
    if again is not None:
        out.append(block.call(aten.neg.default, (q, k, v)[again]))
    block.graph.output(tuple(out))
    assert exclusive(rope, (q, k)) == (again in (None, 2))
