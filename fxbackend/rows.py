"""The proof that rows are independent: only attention moves information between tokens.

An engine lays many sequences one behind the other in one row, so a value that mixes tokens, or depends on a token's
place in the row, would be silently wrong. The proof follows the token dimension of every value through rules per op. An
op without a rule that touches the token dimension is refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxbackend.errors import UnsupportedModelError
from fxbackend.printer import node_text
from fxbackend.program import Program, integer, module_of, operand, operand_list, sizes_of

aten = torch.ops.aten
dialect = torch.ops.fxbackend

Rule = Callable[[fx.Node], "str | None"]

# Their values depend on where a token stands in the row.
_PLACES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_CREATE = (
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.empty.memory_format,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
    aten.lift_fresh_copy.default,
)
_ALONG_DIMS = (
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten.cumsum.default,
    aten.var.correction,
    aten.var.dim,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.topk.default,
    aten.argmax.default,
    aten.max.dim,
    aten.min.dim,
    aten.logsumexp.default,
    aten.norm.ScalarOpt_dim,
    aten.linalg_vector_norm.default,
    aten.sort.default,
    aten.flip.default,
    aten.select.int,
    aten.glu.default,
    aten.prod.dim_int,
)
_PER_TOKEN = (
    dialect.embedding.default,
    dialect.linear.default,
    dialect.qkv.default,
    dialect.glu.default,
    dialect.rms_norm.default,
    dialect.add_rms_norm.default,
    dialect.lm_head.default,
    dialect.all_reduce.default,
    dialect.stage_cut.default,
    dialect.rope.default,
    dialect.rope_qk.default,
    dialect.attention.default,
    aten.layer_norm.default,
    aten.unsqueeze.default,
    aten.to.dtype,
    operator.getitem,
    aten.linear.default,
    aten.native_layer_norm.default,
    aten.rms_norm.default,
    aten.polar.default,
    aten.view_as_complex.default,
    aten.view_as_real.default,
)


def check_rows(program: Program) -> None:
    """Proves a program without hook ops to be independent in its rows.

    Raises:
        UnsupportedModelError: names the first value that mixes tokens, and says how.
    """
    tokens = program.inputs()["input_ids"].meta["val"].shape[-1]
    for node in program.graph.nodes:
        if node.op != "call_function" or not _touches_tokens(node):
            continue
        if node.target in _CREATE and token_dim(node) is None:
            continue  # made for a value of the tokens, but not of it
        reason = _wrong_shape(node, str(tokens)) or _mixes(node)
        if reason is not None:
            raise UnsupportedModelError(
                f"{node_text(node)} in {module_of(node) or 'no module'}: {reason}. A batch is many sequences in one "
                "row, so this would mix them or depend on a token's place in the batch."
            )


def _touches_tokens(node: fx.Node) -> bool:
    """Whether the value, or one that it is made of, has a token dimension."""
    if node.target is aten.sym_size.int:
        return False
    return token_dim(node) is not None or any(token_dim(arg) is not None for arg in node.all_input_nodes)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def token_dim(node: fx.Node) -> int | None:
    """The first dimension that counts tokens."""
    for value in _values(node):
        for dim, size in enumerate(sizes_of(value)):
            if isinstance(size, torch.SymInt):
                return dim
    return None


def _wrong_shape(node: fx.Node, tokens: str) -> str | None:
    for value in _values(node):
        symbolic = [size for size in sizes_of(value) if isinstance(size, torch.SymInt)]
        if len(symbolic) > 1:
            return "it relates every token to every other"
        if symbolic and str(symbolic[0]) != tokens:
            return f"it has {symbolic[0]} rows, not one per token"
        if not symbolic and value.numel() > 0:
            return "it has lost the token dimension"
    return None


def _mixes(node: fx.Node) -> str | None:
    target = node.target
    if target in _PLACES:
        return "it counts the tokens of the batch"
    if target in _PER_TOKEN or target in _CREATE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return _aligned(node)
    if target in _ALONG_DIMS:
        return _along(node)
    rule = _RULES.get(target)
    if rule is None:
        return f"{target} has no rule that shows what it does to the token dimension"
    return rule(node)


def _aligned(node: fx.Node) -> str | None:
    """Operands of a pointwise op have their token dimensions in one place, counted from the right."""
    if any(not _values(arg) for arg in node.all_input_nodes) and not _makes_shape(node):
        return "it computes with the number of tokens in the batch"
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    places = {token_dim(arg) - _values(arg)[0].ndim for arg in node.all_input_nodes if token_dim(arg) is not None}  # type: ignore[operator]
    return "its operands have their tokens in different dimensions" if len(places) > 1 else None


def _makes_shape(node: fx.Node) -> bool:
    """Whether the number of tokens is read as a size only."""
    values = [arg for arg in node.args if isinstance(arg, fx.Node) and not _values(arg)]
    return not values or node.target is operator.getitem


def _along(node: fx.Node) -> str | None:
    source = operand(node, 0)
    dims: Any = node.args[1] if len(node.args) > 1 else None
    if node.target is aten.topk.default:
        dims = node.args[2] if len(node.args) > 2 else -1
    rank = _values(source)[0].ndim
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return "it runs over all dimensions, the tokens among them"
    listed = dims if isinstance(dims, (list, tuple)) else [dims]
    where = token_dim(source)
    if where is None and token_dim(node) is not None:
        return "it takes as many rows as the batch has tokens"
    return "it runs along the token dimension" if where in [int(dim) % rank for dim in listed] else None


def _reshape(node: fx.Node) -> str | None:
    source = _values(operand(node, 0))[0]
    here, there = token_dim(operand(node, 0)), token_dim(node)
    before = torch.Size(source.shape[:here]).numel() if here else 1
    after = torch.Size(_values(node)[0].shape[:there]).numel() if there else 1
    return None if before == after else "the view moves elements across the token dimension"


def _transpose(node: fx.Node) -> str | None:
    return None


def _cat(node: fx.Node) -> str | None:
    dim = integer(node, 1) if len(node.args) > 1 else 0
    places = {token_dim(item) for item in operand_list(node, 0)}
    if dim in places:
        return "it joins along the token dimension"
    return "its operands have their tokens in different dimensions" if len(places - {None}) > 1 else None


def _stack(node: fx.Node) -> str | None:
    places = {token_dim(item) for item in operand_list(node, 0)}
    return "its operands have their tokens in different dimensions" if len(places) > 1 else None


def _addmm(node: fx.Node) -> str | None:
    added, one, two = node.args[:3]
    return _product(node, one, two) if token_dim(added) is None else "it adds a value of the tokens to a product"  # type: ignore[arg-type]


def _matmul(node: fx.Node) -> str | None:
    return _product(node, *node.args[:2])  # type: ignore[arg-type]


def _product(node: fx.Node, one: fx.Node, two: fx.Node) -> str | None:
    a, b = token_dim(one), token_dim(two)
    rank_a, rank_b = _values(one)[0].ndim, _values(two)[0].ndim
    if a == rank_a - 1 or (b is not None and b == max(rank_b - 2, 0)):
        return "it sums over the tokens"
    if a is not None and b is not None and (a - rank_a != b - rank_b or a >= rank_a - 2):
        return "it relates tokens of one operand to those of the other"
    return None


def _lookup(node: fx.Node) -> str | None:
    """`table[values per token]`: the table must not be made of tokens."""
    table = node.args[0]
    return "it picks rows among the tokens" if token_dim(table) is not None else None  # type: ignore[arg-type]


def _index(node: fx.Node) -> str | None:
    """`x[:, :, indices]`: no index for the token dimension."""
    where = token_dim(operand(node, 0))
    indices: Any = node.args[1]
    if where is None:
        return None
    kept = where >= len(indices) or indices[where] is None
    alone = not any(token_dim(each) is not None for each in indices if each is not None)
    return None if kept and alone else "it picks rows among the tokens"


def _gather(node: fx.Node) -> str | None:
    source, dim = node.args[0], int(node.args[1])  # type: ignore[arg-type]
    where = token_dim(source)  # type: ignore[arg-type]
    if where is None:
        return None
    return "it picks among the tokens" if where == dim % _values(source)[0].ndim else None  # type: ignore[arg-type]


def _repeat(node: fx.Node) -> str | None:
    where = token_dim(node.args[0])  # type: ignore[arg-type]
    times = node.args[1]
    if where is None:
        return None
    offset = len(times) - _values(node.args[0])[0].ndim  # type: ignore[arg-type]
    return None if times[where + offset] == 1 else "it repeats the tokens"  # type: ignore[index]


def _repeat_interleave(node: fx.Node) -> str | None:
    dim = node.args[2] if len(node.args) > 2 else None
    return None if isinstance(dim, int) and dim != token_dim(node.args[0]) else "it repeats the tokens"  # type: ignore[arg-type]


def _moe(node: fx.Node) -> str | None:
    """Every operand that is no weight has its tokens in front."""
    if any(token_dim(arg) is not None for arg in node.args[3:7] if isinstance(arg, fx.Node)):
        return "its experts are made of tokens"
    aligned = all(token_dim(arg) == 0 for arg in node.args[:3])  # type: ignore[arg-type]
    return None if aligned else "its operands have their tokens in different dimensions"


def _scatter(node: fx.Node) -> str | None:
    """`x.scatter(dim, index, y)` writes along `dim`, each token into its own part."""
    source, dim, *others = node.args
    where, rank = token_dim(source), _values(source)[0].ndim  # type: ignore[arg-type]
    if where is None or where == int(dim) % rank:  # type: ignore[arg-type]
        return "it writes along the tokens"
    tensors = [other for other in others if isinstance(other, fx.Node) and _values(other)]
    return (
        None
        if all(token_dim(other) in (where, None) for other in tensors) and token_dim(tensors[0]) == where
        else ("its operands have their tokens in different dimensions")
    )


_RULES: dict[object, Rule] = {
    dialect.moe.default: _moe,
    aten.scatter.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.reshape.default: _reshape,
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten.expand.default: _transpose,
    aten.expand_as.default: _transpose,
    aten.broadcast_to.default: _transpose,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.matmul.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.embedding.default: _lookup,
    aten.index.Tensor: _index,
    aten.index_select.default: _lookup,
    aten.gather.default: _gather,
    aten.repeat.default: _repeat,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.one_hot.default: _transpose,
}
