"""How a split of a value travels backwards through an op: the rules behind tensor parallelism.

A *demand* says that a value is needed split by rank along one dimension. For a value that is to come out of an op
split, a rule says what is then demanded of each operand, or why the op cannot work on a part.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from fxbackend.program import integer, module_of, operand, shape_of

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Demand:
    """A value is split along `dim`; `copies` neighbouring ranks hold the same part (KV heads fewer than ranks).

    `sections` > 1 says that the dimension is that many equal parts, each split by itself (gate and up).
    """

    dim: int
    copies: int = 1
    sections: int = 1


class CannotSplit(Exception):
    """Why a block stays replicated; names the node."""


Pairs = Iterator[tuple[fx.Node, Demand]]
Rule = Callable[[fx.Node, Demand, int], Pairs]


def cannot(node: fx.Node, reason: str) -> CannotSplit:
    """The error for a node."""
    return CannotSplit(f"{node.name} ({module_of(node)}): {reason}")


def operands(node: fx.Node, demand: Demand, world: int) -> Pairs:
    """What a split result demands of the operands of `node`; operands that are not named stay whole.

    Raises:
        CannotSplit: the op cannot compute its part from parts of its operands.
    """
    rule = RULES.get(node.target)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = _pointwise
    if rule is None:
        raise cannot(node, f"{node.target} has no rule for operands that are split by rank")
    return rule(node, demand, world)


def _pointwise(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    shape = shape_of(node)
    for arg in node.all_input_nodes:
        value = arg.meta["val"]
        if not isinstance(value, torch.Tensor):
            continue
        dim = demand.dim - (len(shape) - value.ndim)
        if dim >= 0 and value.shape[dim] == shape[demand.dim]:
            yield arg, Demand(dim, demand.copies, demand.sections)


def _reshape(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    source = node.args[0]
    before, after = shape_of(source), shape_of(node)  # type: ignore[arg-type]

    def front(shape: tuple[object, ...], dim: int) -> list[str]:
        return [str(size) for size in shape[:dim] if size != 1]

    places = [dim for dim, size in enumerate(before) if size != 1 and front(before, dim) == front(after, demand.dim)]
    if not places or demand.sections > 1:
        raise cannot(
            node, f"the split dimension {demand.dim} of {list(after)} is no leading part of one of {list(before)}"
        )
    outer, inner = sorted((int(before[places[0]]), int(after[demand.dim])), reverse=True)
    if outer % inner:
        raise cannot(node, f"{list(before)} is viewed as {list(after)} across the borders of the split parts")
    yield source, Demand(places[0], demand.copies)  # type: ignore[misc]


def _transpose(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    source, one, two = node.args
    swap = {one: two, two: one}
    yield source, Demand(swap.get(demand.dim, demand.dim), demand.copies, demand.sections)  # type: ignore[misc, arg-type]


def _unsqueeze(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    yield operand(node, 0), Demand(demand.dim - (demand.dim > integer(node, 1)), demand.copies, demand.sections)


def _squeeze(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    yield operand(node, 0), Demand(demand.dim + (demand.dim >= integer(node, 1)), demand.copies, demand.sections)


def _over_dims(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    """Ops that mix the elements of the dimensions in their second argument (slice, cat, softmax, mean)."""
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    if demand.dim in dims:
        raise cannot(node, f"{node.target} mixes the elements of dimension {demand.dim}, which would be split")
    sources = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    for source in sources:
        yield source, demand  # type: ignore[misc]


def _norm(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    rank = len(shape_of(node))
    width = len(node.args[1]) if node.target is aten.layer_norm.default else 1  # type: ignore[arg-type]
    if node.target is dialect.rms_norm.default and demand.dim == rank - 1 and demand.sections == 1:
        # The pass reduces the statistics (Olmo2 and OLMoE normalise all heads at once).
        yield node.args[0], demand  # type: ignore[misc]
        if node.args[1] is not None:
            yield node.args[1], Demand(0, demand.copies)  # type: ignore[misc]
        return
    if demand.dim >= rank - width:
        raise cannot(node, "its statistics run over the dimension that would be split")
    yield node.args[0], demand  # type: ignore[misc]


def _glu(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    if demand.dim != 1 or demand.sections > 1:
        raise cannot(node, "a gated unit is split along its width only")
    yield node.args[0], Demand(1, demand.copies, sections=2)  # type: ignore[misc]


def _rope(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    if demand.dim != 1:
        raise cannot(node, "a rotary embedding is split by head only")
    yield node.args[0], demand  # type: ignore[misc]


def _getitem(node: fx.Node, demand: Demand, _world: int) -> Pairs:
    source, index = node.args
    if source.target is dialect.rope_qk.default:  # type: ignore[union-attr]
        if demand.dim != 1:
            raise cannot(node, "a rotary embedding is split by head only")
        yield source.args[index], demand  # type: ignore[misc, index, union-attr]
    elif source.target is not dialect.qkv.default:  # type: ignore[union-attr]
        raise cannot(node, f"{source.target} has no rule for results that are split by rank")  # type: ignore[union-attr]


def _attention(node: fx.Node, demand: Demand, world: int) -> Pairs:
    if demand.dim != 1:
        raise cannot(node, "an attention is split by head only")
    q, k, v, sinks = node.args[:4]
    heads, kv_heads = int(shape_of(q)[1]), int(shape_of(k)[1])  # type: ignore[arg-type]
    copies = max(1, world // kv_heads)
    if heads % world or kv_heads * copies % world:
        raise cannot(node, f"{heads} query and {kv_heads} key heads cannot be dealt to {world} ranks")
    yield q, Demand(1)  # type: ignore[misc]
    yield k, Demand(1, copies)  # type: ignore[misc]
    yield v, Demand(1, copies)  # type: ignore[misc]
    for per_head in (sinks, *node.args[7:]):  # sinks and ALiBi slopes
        if per_head is not None:
            yield per_head, Demand(0)  # type: ignore[misc]


RULES: dict[object, Rule] = {
    aten.reshape.default: _reshape,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.slice.Tensor: _over_dims,
    aten.cat.default: _over_dims,
    aten.softmax.int: _over_dims,
    aten.mean.dim: _over_dims,
    aten.sum.dim_IntList: _over_dims,
    aten.amax.default: _over_dims,
    aten.to.dtype: _pointwise,
    aten.layer_norm.default: _norm,
    dialect.rms_norm.default: _norm,
    dialect.glu.default: _glu,
    dialect.rope.default: _rope,
    operator.getitem: _getitem,
    dialect.attention.default: _attention,
}


@dataclass
class Block:
    """What is split between column projections and one row projection.

    Attributes:
        row: the linear whose input is split; its output is to be summed over ranks.
        demands: how each value (and weight vector) of the block is split.
        columns: the projections whose outputs are split.
        tuples: calls of the block that return several values.
    """

    row: fx.Node
    demands: dict[fx.Node, Demand] = field(default_factory=dict)
    columns: list[fx.Node] = field(default_factory=list)
    tuples: set[fx.Node] = field(default_factory=set)


def find_block(row: fx.Node, world: int) -> Block:
    """The block whose row projection is the linear `row`, for `world` ranks.

    Raises:
        CannotSplit: the block must stay whole; the message says at which node and why.
    """
    block = Block(row)
    pending: list[tuple[fx.Node, Demand, fx.Node]] = [(row.args[0], Demand(1), row)]  # type: ignore[list-item]
    while pending:
        node, demand, user = pending.pop()
        if (known := block.demands.get(node)) is not None:
            if known != demand:
                raise cannot(node, "is needed split in two ways")
            continue
        block.demands[node] = demand
        size = shape_of(node)[demand.dim]
        parts = world // demand.copies * demand.sections
        if not isinstance(size, int) or size % parts:
            raise cannot(node, f"dimension {demand.dim} of {list(shape_of(node))} is not divided by {parts}")
        if node.op == "get_attr":
            continue
        if node.op == "placeholder" or node.target in (dialect.embedding.default, dialect.lm_head.default):
            raise cannot(user, f"needs {node.name}, which every rank holds whole")
        if node.target is dialect.linear.default:
            _column(node, demand)
            block.columns.append(node)
            continue
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is dialect.qkv.default:
            if source not in block.columns:
                block.columns.append(source)
            continue
        if node.target is operator.getitem:
            block.tuples.add(source)  # type: ignore[arg-type]
        pending += [(arg, wanted, node) for arg, wanted in operands(node, demand, world)]
    if not block.columns:
        raise cannot(row, "no projection makes its input")
    _closed(block)
    return block


def _column(node: fx.Node, demand: Demand) -> None:
    if demand.dim != 1:
        raise cannot(node, "the result of a projection is split along its width only")


def _closed(block: Block) -> None:
    """Every user of a split value is in the block; every weight it splits has no other reader."""
    inside = {*block.demands, *block.columns, *block.tuples, block.row}
    for node in inside - {block.row}:
        for user in node.users:
            if user not in inside:
                raise cannot(node, f"is used outside of its block, by {user.name}")
    for column in block.columns:
        for weight in column.args[1:3]:
            if isinstance(weight, fx.Node) and (weight.op != "get_attr" or len(weight.users) > 1):
                raise cannot(column, f"{weight.target} is not a weight that only this place reads")
    weight = block.row.args[1]
    if weight.op != "get_attr" or len(weight.users) > 1:  # type: ignore[union-attr]
        raise cannot(block.row, f"{weight.target} is read elsewhere as well")  # type: ignore[union-attr]


def inner_width(node: fx.Node, world: int) -> int:
    """The inner width of the experts of a `moe`, which is split over `world` ranks.

    Raises:
        CannotSplit: the ranks do not divide it, or a weight is not the node's own.
    """
    inner = int(shape_of(node.args[4])[2])  # type: ignore[arg-type]
    if inner % world:
        raise cannot(node, f"the inner width {inner} of its experts is not divided by {world}")
    for weight in node.args[3:7]:
        if isinstance(weight, fx.Node) and (weight.op != "get_attr" or len(weight.users) > 1):
            raise cannot(node, f"{weight.target} is not a weight that only this place reads")
    return inner
