"""`linear(act(linear(x, W1)), W2) = sum over ranks of linear(act(linear(x, W1[rows])), W2[columns])`.

Before and after, on one of two ranks:

    q, k, v = fxbackend.qkv(x, w, None, 128, 64, 64)        q, k, v = fxbackend.qkv(x, w', None, 64, 32, 32)
    a = fxbackend.attention(..., 4 heads ...)               a = fxbackend.attention(..., 2 heads ...)
    y = fxbackend.linear(a, wo, None)                       y = fxbackend.all_reduce(fxbackend.linear(a, wo', None))

For every linear the pass walks back from its input, asking each op what must be split for its own result to be split,
until it arrives at projections: those become column parallel, the linear becomes row parallel, and the block costs one
reduction. A bias of the row side is added once, after it. The vocabulary ops (`embedding`, `lm_head`) are whole by
definition; a target splits them inside. A norm over the full width of q or k (Olmo2) gets its statistics reduced.

Experts are split like a gated unit: each rank holds a slice of the inner width of every expert, and the results are
summed. The bias of their second projection is zeros on all ranks but the first. The router stays whole.

Refuses (the block stays replicated, with the reason in the report): an op on the way that needs the whole value, a
value of the block that is used outside of it, heads or widths that the ranks do not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.errors import PipelineError
from fxbackend.pass_base import Pass
from fxbackend.program import Stage, shape_of, value_of
from fxbackend.rewriter import Rewriter
from fxbackend.sharding import Block, CannotSplit, find_block, inner_width
from fxbackend.weights import Shard

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class ShardTensorParallel(Pass):
    """See the module's docstring.

    Attributes:
        world: number of tensor-parallel ranks.
        rank: the rank whose program this becomes.
    """

    name: ClassVar[str] = "shard_tensor_parallel"
    stage: ClassVar[Stage] = Stage.PARALLEL
    world: int = 1
    rank: int = 0

    def run(self, rw: Rewriter) -> None:
        """Finds every block first, then splits them and infers all shapes anew."""
        if not 0 <= self.rank < self.world:
            raise PipelineError(f"rank {self.rank} is not one of {self.world} tensor-parallel ranks.")
        rw.set_rank(self.rank, self.world)
        if self.world == 1:
            return
        taken: set[fx.Node] = set()
        blocks = []
        whole: list[tuple[fx.Node, CannotSplit]] = []
        for row in rw.program.calls(dialect.linear.default):
            if row in taken:
                continue
            try:
                block = find_block(row, self.world)
            except CannotSplit as reason:
                whole.append((row, reason))
                continue
            if taken.isdisjoint([*block.columns, *block.demands]):
                taken.update(block.columns, block.demands, [row])
                blocks.append(block)
                rw.matched()
        for row, why in whole:
            if row not in taken:
                rw.refuse(row, f"stays whole on every rank: {why}")
        for block in blocks:
            _split(rw, block, self.world)
        for node in rw.program.calls(dialect.moe.default):
            _split_experts(rw, node, self.world)
        rw.infer_all()


def _split(rw: Rewriter, block: Block, world: int) -> None:
    for column in block.columns:
        if column.target is dialect.qkv.default:
            wanted = {user.args[1]: block.demands[user] for user in column.users}
            sizes = [int(size) for size in column.args[3:]]  # type: ignore[arg-type]
            copies = tuple(wanted[index].copies for index in range(3))
            for operand in column.args[1:3]:
                _shard(rw, operand, Shard(0, tuple(sizes), copies), world)
            local = [size * each // world for size, each in zip(sizes, copies, strict=True)]
            rw.set_args(column, *column.args[:3], *local, infer=False)
        else:
            demand = block.demands[column]
            width = int(shape_of(column)[1]) // demand.sections
            shard = Shard(0, (width,) * demand.sections, (demand.copies,) * demand.sections)
            for operand in column.args[1:3]:
                _shard(rw, operand, shard, world)
    for node, demand in block.demands.items():
        if node.op == "get_attr":
            size = int(shape_of(node)[demand.dim])
            _shard(rw, node, Shard(demand.dim, (size,), (demand.copies,)), world)
        elif node.target is aten.reshape.default:
            sizes = list(node.args[1])  # type: ignore[arg-type]
            if sizes[demand.dim] != -1:
                sizes[demand.dim] = int(shape_of(node)[demand.dim]) * demand.copies // world
            rw.set_args(node, node.args[0], sizes, infer=False)
        elif node.target is dialect.rms_norm.default and demand.dim == len(shape_of(node)) - 1:
            _reduce_statistics(rw, node, demand.copies)
    _reduce(rw, block.row, world)


def _split_experts(rw: Rewriter, node: fx.Node, world: int) -> None:
    try:
        inner = inner_width(node, world)
    except CannotSplit as reason:
        rw.refuse(node, f"stays whole on every rank: {reason}")
        return
    gate_up, down, gate_up_bias, down_bias = node.args[3:7]
    for operand in (gate_up, gate_up_bias):
        _shard(rw, operand, Shard(1, (inner, inner), (1, 1)), world)
    _shard(rw, down, Shard(2, (inner,), (1,)), world)
    if isinstance(down_bias, fx.Node):
        _shard(rw, down_bias, Shard(0, (int(shape_of(down_bias)[0]),), (world,), first=True), world)
    with rw.at(node.next, origin=node):
        total = rw.call(dialect.all_reduce.default, node)
    rw.reroute_after(node, total)
    rw.matched()


def _reduce_statistics(rw: Rewriter, norm: fx.Node, copies: int) -> None:
    """A norm whose width is split: the sum of squares goes over all ranks, each part counted once."""
    x, weight, eps, offset, order = norm.args
    dtype, last = value_of(norm).dtype, len(shape_of(norm)) - 1
    count = int(shape_of(norm)[last]) * copies
    with rw.at(norm):
        wide = rw.call(aten.to.dtype, x, torch.float32) if dtype != torch.float32 else x
        squares = rw.call(aten.sum.dim_IntList, rw.call(aten.pow.Tensor_Scalar, wide, 2), [last], True)
        mean = rw.call(aten.div.Tensor, rw.call(dialect.all_reduce.default, squares), count)
        new = rw.call(aten.mul.Tensor, wide, rw.call(aten.rsqrt.default, rw.call(aten.add.Tensor, mean, eps)))
        if weight is not None:
            scale = weight if not offset else rw.call(aten.add.Tensor, weight, offset)
            if order == "before" and dtype != torch.float32:
                new = rw.call(aten.to.dtype, new, dtype)
            new = rw.call(aten.mul.Tensor, new, scale)
        if dtype != torch.float32:
            new = rw.call(aten.to.dtype, new, dtype)
        rw.replace({norm: new})


def _reduce(rw: Rewriter, row: fx.Node, world: int) -> None:
    x, weight, bias = row.args
    width = int(shape_of(weight)[1])  # type: ignore[arg-type]
    _shard(rw, weight, Shard(1, (width,), (1,)), world)
    following = row.next
    rw.set_args(row, x, weight, None, infer=False)
    with rw.at(following, origin=row):
        total = rw.call(dialect.all_reduce.default, row)
        if bias is not None:
            total = rw.call(aten.add.Tensor, total, bias)
    rw.reroute_after(row, total)


def _shard(rw: Rewriter, operand: object, shard: Shard, world: int) -> None:
    if isinstance(operand, fx.Node):
        rw.shard_slot(str(operand.target), shard, world)
