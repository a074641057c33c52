"""`softmax(f(q k^T)) v = attention(q, k, v)`: an attention written by hand, found from its softmax.

Before and after (gpt_neo, codegen, gptj, bloom, mpt, and a custom class with `matmul / sqrt(d)`):

    s = aten.matmul(q, k_t); a = aten.add(aten.mul(s, 0.25), mask)
    y = aten.matmul(aten.softmax(a, 2), v)      y = fxbackend.attention(q, k, v, None, 0.25, 0, 0.0, slopes)

The walk goes back from the softmax, through values that hold something of the hidden states, to the one product, and
forward to the product with v. The score function between is run on concrete scores (`fxbackend/scores.py`).

Refuses: a second user of scores or weights, a mask or bias made from hidden states or trained weights, a score function
that no paged attention computes. The softmax is left, and what needs one meaning of tokens refuses it later by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.pass_base import Pass, Refuse
from fxbackend.program import Stage, operand, shape_of
from fxbackend.rewriter import Rewriter
from fxbackend.scores import Scores, UnknownScores, scores_between

aten = torch.ops.aten
dialect = torch.ops.fxbackend

_PRODUCTS = (aten.matmul.default, aten.bmm.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_FORWARD = (aten.to.dtype, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default, aten.expand.default)
_VIEWS = (*_FORWARD, aten.transpose.int, aten.slice.Tensor)


@dataclass(frozen=True)
class RaiseAttention(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "raise_attention"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """One attention per softmax with a product in front and behind."""
        hidden = rw.program.made_of_ids()
        known: dict[object, Scores] = {}
        for softmax in rw.program.calls(*_SOFTMAX):
            try:
                product = _back(softmax, hidden)
                if product is None:
                    continue
                last = _forward(softmax)
                scores = _scores(rw, softmax, product, known)
            except Refuse as reason:
                rw.refuse(softmax, str(reason))
                continue
            with rw.at(last, origin=softmax):
                rw.replace({last: _attention(rw, product, last, scores)})
            rw.matched()


def _back(softmax: fx.Node, hidden: set[fx.Node]) -> fx.Node | None:
    """The product of queries and keys; None when there is none (a router's softmax)."""
    node, user = operand(softmax, 0), softmax
    while node.target not in _PRODUCTS:
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        behind = [arg for arg in node.all_input_nodes if arg in hidden]
        if node.op != "call_function" or not (pointwise or node.target in _VIEWS) or not behind:
            return None
        if len(behind) > 1:
            raise Refuse(f"{node.name} adds two values of the hidden states to one score: {[b.name for b in behind]}")
        if len(node.users) > 1:
            raise Refuse(
                f"the scores {node.name} are read elsewhere as well, by "
                f"{[each.name for each in node.users if each is not user]}"
            )
        node, user = behind[0], node
    shape = shape_of(node)
    if len(shape) < 3 or not all(isinstance(size, torch.SymInt) for size in shape[-2:]):
        return None
    if len(node.users) > 1:
        raise Refuse(f"the product {node.name} of queries and keys is read elsewhere as well")
    return node


def _forward(softmax: fx.Node) -> fx.Node:
    """The product of weights and values."""
    if softmax.args[1] != len(shape_of(softmax)) - 1:
        raise Refuse(f"the softmax runs over dimension {softmax.args[1]}, not over the keys")
    node = softmax
    while True:
        if len(node.users) != 1:
            raise Refuse(f"the weights {node.name} have {len(node.users)} users: {[each.name for each in node.users]}")
        (user,) = node.users
        if user.target in _PRODUCTS:
            if user.args[0] is not node:
                raise Refuse(f"the weights {node.name} stand on the right of the product {user.name}")
            return user
        if user.target not in _FORWARD:
            raise Refuse(f"the weights go through {user.target} before they meet the values")
        node = user


def _scores(rw: Rewriter, softmax: fx.Node, product: fx.Node, known: dict[object, Scores]) -> Scores:
    try:
        return scores_between(rw.program, product, operand(softmax, 0), known)
    except UnknownScores as reason:
        raise Refuse(str(reason)) from reason


def _attention(rw: Rewriter, product: fx.Node, last: fx.Node, scores: Scores) -> fx.Node:
    q = _heads_first(rw, operand(product, 0))
    k = _turned(rw, _heads_first(rw, operand(product, 1)))
    v = _heads_first(rw, operand(last, 1))
    groups = _repeats(k), _repeats(v)
    if groups[0] is not None and groups[1] is not None and shape_of(groups[0])[0] == shape_of(groups[1])[0]:
        k, v = groups  # type: ignore[assignment]
    parts = [rw.call(aten.transpose.int, each, 0, 1) for each in (q, k, v)]
    slopes = None if scores.slopes is None else _slopes(rw, scores.slopes)
    new = rw.call(dialect.attention.default, *parts, None, scores.scale, scores.window, scores.softcap, slopes)
    new = rw.call(aten.transpose.int, new, 0, 1)
    for _axis in range(len(shape_of(last)) - 3):
        new = rw.call(aten.unsqueeze.default, new, 0)
    return new


def _turned(rw: Rewriter, node: fx.Node) -> fx.Node:
    """Keys `[heads, tokens, width]` from `[heads, width, tokens]`."""
    if node.target is aten.transpose.int and node.args[1:] == (1, 2):
        return operand(node, 0)
    return rw.call(aten.transpose.int, node, 1, 2)


def _repeats(node: fx.Node) -> fx.Node | None:
    """`[kv heads, tokens, width]` behind heads that repeat each of them (grouped and multi-query attention)."""
    if node.target is aten.repeat_interleave.self_int and node.args[2] == 0:
        return operand(node, 0)
    if node.target is not aten.reshape.default or operand(node, 0).target is not aten.expand.default:
        return None
    expanded = operand(node, 0)
    source = operand(expanded, 0)
    shape, before = shape_of(expanded), shape_of(source)
    if source.target is not aten.unsqueeze.default or source.args[1] != 1 or len(shape) != 4:
        return None
    same = before[1] == 1 and shape[0] == before[0] and shape_of(node)[0] == int(shape[0]) * int(shape[1])
    return operand(source, 0) if same else None


def _slopes(rw: Rewriter, slopes: tuple[float, ...]) -> fx.Node:
    """A constant of this attention alone: one rank of several holds its own heads' slopes."""
    count = sum(name.startswith("alibi_slopes_") for name in rw.weights.constants)
    return rw.add_constant(f"alibi_slopes_{count}", torch.tensor(slopes))


def _heads_first(rw: Rewriter, node: fx.Node) -> fx.Node:
    """`[heads, ., .]`, without leading axes of one."""
    while len(shape_of(node)) > 3:
        if shape_of(node)[0] != 1:
            raise Refuse(f"{node.name} is {list(shape_of(node))}, more than heads and two dimensions")
        node = rw.call(aten.squeeze.dim, node, 0)
    return node
