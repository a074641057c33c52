"""One builder per op of the dialect: which adapter takes its place, and where the adapter's weights come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxbackend.errors import LoweringError
from fxbackend.program import module_of, shape_of
from fxbackend.targets.vllm import experts, layers
from fxbackend.targets.vllm.aliasing import exclusive
from fxbackend.weights import Shard, Slot

if TYPE_CHECKING:
    from fxbackend.targets.vllm.lowering import Builders, PartLowering

aten = torch.ops.aten
dialect = torch.ops.fxbackend


def _owner(slot: Slot) -> str:
    """`model.layers.0.mlp.down_proj` for its weight."""
    return slot.name.rpartition(".")[0] or slot.name


def _local_name(slot: Slot | None) -> str:
    return slot.name if slot is not None else ""


def _embedding(low: PartLowering, node: fx.Node) -> fx.Node:
    ids, operand = node.args
    slot = low.slot(operand)
    if slot is None or not slot.pieces or slot.shard is not None:
        return low.plain(node)
    vocabulary = ids.op == "placeholder" and ids.target == "input_ids"  # type: ignore[union-attr]

    def make(path: str) -> layers.Adapter:
        return layers.Embedding(
            *slot.shape,
            replicated=not vocabulary,
            dtype=slot.dtype,
            quant_config=low.shared.config.quant_config,
            prefix=path,
        )

    def fill(adapter: layers.Adapter) -> None:
        if vocabulary:
            low.shared.embeddings[slot.name] = adapter  # type: ignore[assignment]
        low.shared.receive(slot, partial(adapter.load, "weight"))

    return low.call(node, _owner(slot), ("embedding", slot.name, vocabulary), make, (ids,), fill)


def _linear(low: PartLowering, node: fx.Node) -> fx.Node:
    x, weight, bias = node.args
    slot, bias_slot = low.slot(weight), low.slot(bias)
    if slot is None or not slot.pieces or (bias is not None and bias_slot is None):
        return low.plain(node)
    if bias_slot is not None and not bias_slot.pieces:
        return low.plain(node)
    if slot.shard is not None and slot.shard.dim == 1:
        return _row(low, node, slot)
    if bias_slot is not None and bias_slot.shard != slot.shard:
        return low.plain(node)
    return low.call(
        node,
        _owner(slot),
        ("linear", slot.name, _local_name(bias_slot)),
        partial(_stacked, low, slot, bias_slot),
        (x,),
        _stacked_fill(low, slot, bias_slot),
    )


def _stacked(low: PartLowering, slot: Slot, bias: Slot | None, path: str) -> layers.Adapter:
    """A linear that every rank holds whole, or split by output; stacked projections are split one by one."""
    outputs = _outputs(slot)
    return layers.Linear(
        slot.shape[1],
        sum(outputs),
        bias=bias is not None,
        mode="replicated" if slot.shard is None else "column",
        sections=outputs,
        dtype=slot.dtype,
        quant_config=low.shared.config.quant_config,
        prefix=path,
    )


def _outputs(slot: Slot) -> tuple[int, ...]:
    """Output sizes of the stacked projections as the layer is told: heads that ranks share count once per rank."""
    if slot.shard is None:
        return slot.sections
    return tuple(size * copies for size, copies in zip(slot.shard.sections, slot.shard.replicate, strict=True))


def _stacked_fill(low: PartLowering, slot: Slot, bias: Slot | None) -> Callable[[layers.Adapter], None]:
    def fill(adapter: layers.Adapter) -> None:
        for each, name in ((slot, "weight"), (bias, "bias")):
            if each is not None:
                sections = each.sections if each.shard is None else each.shard.sections
                low.shared.receive(each, partial(_load_stacked, low, adapter, name, each.shard), sections)

    return fill


def _load_stacked(
    low: PartLowering, adapter: layers.Adapter, name: str, shard: Shard | None, value: torch.Tensor, section: int | None
) -> None:
    copies = 1 if shard is None else shard.replicate[section or 0]
    if copies > 1:  # the layer cuts one part per rank; ranks that share a part find it several times
        parts = value.chunk(low.shared.world // copies)
        value = torch.cat([part for part in parts for _ in range(copies)])
    adapter.load(name, value, section)


def _row(low: PartLowering, node: fx.Node, slot: Slot) -> fx.Node:
    """A linear split by input; the reduction behind it, and the bias behind that, become the layer's own."""
    if node.args[2] is not None or slot.shard.sections != slot.shape[1:] or slot.shard.replicate != (1,):  # type: ignore[union-attr]
        return low.plain(node)
    total = _only_user(node, dialect.all_reduce.default)
    added = None if total is None else _only_user(total, aten.add.Tensor)
    bias = None if added is None else next((b for b in map(low.slot, added.args) if b is not None), None)
    if bias is not None and (bias.shape != slot.shape[:1] or not bias.pieces or bias.shard is not None or added.kwargs):  # type: ignore[union-attr]
        bias = None

    def make(path: str) -> layers.Adapter:
        return layers.Linear(
            slot.shape[1],
            slot.shape[0],
            bias=bias is not None,
            mode="row",
            reduce=total is not None,
            dtype=slot.dtype,
            quant_config=low.shared.config.quant_config,
            prefix=path,
        )

    def fill(adapter: layers.Adapter) -> None:
        low.shared.receive(slot, partial(adapter.load, "weight"))
        if bias is not None:
            low.shared.receive(bias, partial(adapter.load, "bias"))

    key = ("row", slot.name, _local_name(bias), total is not None)
    new = low.call(node, _owner(slot), key, make, (node.args[0],), fill)
    if total is not None:
        low.nodes[total] = new
    if bias is not None and added is not None:
        low.nodes[added] = new
    return new


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _qkv(low: PartLowering, node: fx.Node) -> fx.Node:
    x, weight, bias = node.args[:3]
    sizes = tuple(int(size) for size in node.args[3:])  # type: ignore[arg-type]
    slot, bias_slot = low.slot(weight), low.slot(bias)
    if slot is None or not slot.pieces or (bias is not None and (bias_slot is None or bias_slot.shard != slot.shard)):
        return low.plain(node)
    if slot.shard is None and slot.sections != sizes:
        return low.plain(node)
    heads = _heads(node, sizes)
    if heads is None:  # no layer for it: the stacked projection, then a split
        key = ("linear", slot.name, _local_name(bias_slot))
        whole = low.call(
            node,
            _owner(slot),
            key,
            partial(_stacked, low, slot, bias_slot),
            (x,),
            _stacked_fill(low, slot, bias_slot),
        )
        return low.function(node, aten.split_with_sizes.default, whole, list(sizes), -1)
    size, v_size = heads
    whole_sizes = sizes if slot.shard is None else slot.shard.sections

    def make(path: str) -> layers.Adapter:
        return layers.QKV(
            slot.shape[1],
            whole_sizes[0] // size,
            whole_sizes[1] // size,
            size,
            v_size,
            bias=bias_slot is not None,
            dtype=slot.dtype,
            replicated=slot.shard is None,
            quant_config=low.shared.config.quant_config,
            prefix=path,
        )

    def fill(adapter: layers.Adapter) -> None:
        for each, name in ((slot, "weight"), (bias_slot, "bias")):
            if each is not None:
                low.shared.receive(each, partial(adapter.load, name), whole_sizes)

    return low.call(node, _owner(slot), ("qkv", slot.name, _local_name(bias_slot)), make, (x,), fill)


def _heads(node: fx.Node, sizes: tuple[int, ...]) -> tuple[int, int] | None:
    """Head sizes of k and v, read off the attention that takes all three results; None where they do not fit."""
    attention = _attention_behind(node)
    if attention is None:
        return None
    shapes = [shape_of(operand) for operand in attention.args[:3]]  # type: ignore[arg-type]
    if tuple(int(heads) * int(size) for _, heads, size in shapes) != sizes or shapes[1][1] != shapes[2][1]:
        return None
    return int(shapes[1][2]), int(shapes[2][2])


def _attention_behind(node: fx.Node) -> fx.Node | None:
    pending, seen = list(node.users), set(node.users)
    while pending:
        each = pending.pop()
        if each.target is dialect.attention.default:
            return each
        new = [user for user in each.users if user not in seen]
        seen.update(new)
        pending += new if each.target is not dialect.linear.default else []
    return None


def _glu(low: PartLowering, node: fx.Node) -> fx.Node:
    x, activation = node.args
    path = f"{module_of(node) or 'glu'}.act_and_mul"
    return low.call(node, path, ("glu", node), lambda _: layers.GLU(str(activation)), (x,))


def _rms_norm(low: PartLowering, node: fx.Node) -> fx.Node:
    x, weight, eps, offset, cast = node.args
    return _norm(low, node, (x,), weight, (eps, offset, cast), layers.RMSNorm)  # type: ignore[arg-type]


def _add_rms_norm(low: PartLowering, node: fx.Node) -> fx.Node:
    x, residual, weight, eps, offset, cast = node.args
    inplace = shape_of(x) == shape_of(residual) and exclusive(node, (x, residual))  # type: ignore[arg-type]
    make = partial(layers.AddRMSNorm, inplace=inplace)
    return _norm(low, node, (x, residual), weight, (eps, offset, cast), make, inplace)  # type: ignore[arg-type]


def _norm(
    low: PartLowering,
    node: fx.Node,
    operands: tuple[fx.Node, ...],
    weight: object,
    how: tuple[float, float, str],
    adapter: Callable[..., layers.Adapter],
    inplace: bool = False,
) -> fx.Node:
    slot, width = low.slot(weight), int(shape_of(operands[0])[-1])
    if weight is not None and (slot is None or not slot.pieces or slot.local_shape(low.shared.world) != (width,)):
        return low.plain(node)
    eps, offset, cast = how

    def make(path: str) -> layers.Adapter:
        dtype = None if slot is None else slot.dtype
        return adapter(width, eps, offset=offset, cast=cast, weighted=slot is not None, dtype=dtype)

    def load(made: layers.Adapter, value: torch.Tensor, section: int | None) -> None:
        made.load("weight", low.shared.take(slot.shard, value))  # type: ignore[union-attr]

    def fill(made: layers.Adapter) -> None:
        if slot is not None:
            low.shared.receive(slot, partial(load, made))

    path = _owner(slot) if slot is not None else f"{module_of(node) or 'norm'}.rms_norm"
    key = (node.target, slot.name if slot else node, how, inplace)
    return low.call(node, path, key, make, operands, fill)


def _rope(low: PartLowering, node: fx.Node) -> fx.Node:
    *operands, positions, table, interleaved = node.args
    slot = low.slot(table)
    value = None if slot is None else low.shared.program.weights.constants.get(slot.name)
    sizes = {int(shape_of(each)[2]) for each in operands}  # type: ignore[arg-type]
    if slot is None or value is None or len(sizes) != 1:
        return low.plain(node)
    (size,) = sizes
    inplace = exclusive(node, operands)  # type: ignore[arg-type]

    def make(path: str) -> layers.Adapter:
        return layers.Rope(size, value.to(torch.empty(0).device), interleaved=bool(interleaved), inplace=inplace)

    key = ("rope", slot.name, size, interleaved, inplace)
    return low.call(node, slot.name, key, make, (positions, *operands))


def _attention(low: PartLowering, node: fx.Node) -> fx.Node:
    q, k, v, sinks, scale, window, softcap, *rest = node.args
    slopes = _alibi_slopes(low, rest[0] if rest else None)
    slot = low.slot(sinks)
    if sinks is not None and (slot is None or not slot.pieces):
        raise LoweringError(
            f"the sinks of {node.name} in {module_of(node)} are computed; the engine takes a weight only."
        )
    (_, heads, size), (_, kv_heads, _), (_, _, v_size) = (shape_of(each) for each in (q, k, v))  # type: ignore[arg-type]
    name = f"layers.{node.meta['attention_number']}.attn"

    def make(path: str) -> layers.Adapter:
        return layers.Attention(
            int(heads),
            int(kv_heads),
            int(size),
            int(v_size),
            scale=float(scale),  # type: ignore[arg-type]
            window=int(window),  # type: ignore[arg-type]
            softcap=float(softcap),  # type: ignore[arg-type]
            sinks=sinks is not None,
            alibi_slopes=slopes,
            cache_config=low.shared.config.cache_config,
            quant_config=low.shared.config.quant_config,
            name=name,
        )

    def fill(adapter: layers.Adapter) -> None:
        if slot is not None:
            low.shared.receive(slot, partial(adapter.load, "sinks"))

    return low.call(node, f"{module_of(node) or 'attention'}.attn", ("attention", node), make, (q, k, v), fill)


def _alibi_slopes(low: PartLowering, alibi: object) -> list[float] | None:
    """The slopes of this rank's heads."""
    slot = low.slot(alibi)
    if slot is None:
        return None
    shared = low.shared
    return [float(slope) for slope in shared.program.weights.value(slot, {}, shared.rank, shared.world)]


def _lm_head(low: PartLowering, node: fx.Node) -> fx.Node:
    x, weight, bias = node.args
    slot, bias_slot = low.slot(weight), low.slot(bias)
    if slot is None or not slot.pieces or (bias is not None and (bias_slot is None or not bias_slot.pieces)):
        raise LoweringError(
            f"the weights of the language-model head {node.name} in {module_of(node)} are computed; the engine takes "
            "plain ones only."
        )
    tied = low.shared.embeddings.get(slot.name)

    def make(path: str) -> layers.Adapter:
        return layers.LMHead(
            *slot.shape,
            bias=bias is not None,
            tied=tied,
            dtype=slot.dtype,
            quant_config=low.shared.config.quant_config,
            prefix=path,
        )

    def fill(adapter: layers.Adapter) -> None:
        if tied is None:
            low.shared.receive(slot, partial(adapter.load, "weight"))
        if bias_slot is not None:
            low.shared.receive(bias_slot, partial(adapter.load, "bias"))

    return low.call(node, "lm_head", ("lm_head", slot.name), make, (x,), fill)


def _all_reduce(low: PartLowering, node: fx.Node) -> fx.Node:
    return low.function(node, layers.all_reduce, low.value(node.args[0]))  # type: ignore[arg-type]


def _all_gather(low: PartLowering, node: fx.Node) -> fx.Node:
    return low.function(node, layers.all_gather, low.value(node.args[0]), node.args[1])  # type: ignore[arg-type]


def _stage_cut(low: PartLowering, node: fx.Node) -> fx.Node:
    return low.value(node.args[0])  # type: ignore[arg-type]


BUILDERS: Builders = {
    dialect.embedding.default: _embedding,
    dialect.linear.default: _linear,
    dialect.qkv.default: _qkv,
    dialect.glu.default: _glu,
    dialect.rms_norm.default: _rms_norm,
    dialect.add_rms_norm.default: _add_rms_norm,
    dialect.rope.default: _rope,
    dialect.rope_qk.default: _rope,
    dialect.attention.default: _attention,
    dialect.moe.default: experts.build,
    dialect.lm_head.default: _lm_head,
    dialect.all_reduce.default: _all_reduce,
    dialect.all_gather.default: _all_gather,
    dialect.stage_cut.default: _stage_cut,
}
