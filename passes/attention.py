"""`hf_attention(q, k, v, mask) = attention(q, k, v)`: a call of Transformers' interface becomes the attention op.

Before and after:

    m = attention_mask(_, "sliding", 128)
    y = hf_attention(q[1, Hq, T, D], k, v, m, s, scale, cap, 128, "layers.0.self_attn")     [1, T, Hq, Dv]
    y = attention(q[T, Hq, D], k[T, Hkv, D], v[T, Hkv, Dv], s, scale, 128, cap)[None]       [1, T, Hq, Dv]

The mask's rule decides which tokens are seen, as it does in Transformers' eager attention.

Raises: an attention with a mask that is no known rule, or whose `sliding_window` keyword contradicts its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxbackend.errors import UnsupportedModelError
from fxbackend.pass_base import Pass
from fxbackend.program import Stage, module_of, shape_of
from fxbackend.rewriter import Rewriter

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Attention(Pass):
    """See the module's docstring."""

    name: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        """Rewrites every call; one that cannot be is an error, since it has no other meaning in a target."""
        for node in rw.program.calls(dialect.hf_attention.default):
            q, k, v, mask, sinks, scale, softcap, keyword, layer = node.args
            window = _window(rw, node, mask, int(keyword), str(layer))  # type: ignore[arg-type]
            _check_shapes(node, *(shape_of(each) for each in (q, k, v)))  # type: ignore[arg-type]
            with rw.at(node):
                parts = [rw.call(aten.transpose.int, rw.call(aten.squeeze.dim, each, 0), 0, 1) for each in (q, k, v)]
                new = rw.call(dialect.attention.default, *parts, sinks, scale, window, softcap)
                new.meta["module"] = str(layer)
                rw.replace({node: rw.call(aten.unsqueeze.default, new, 0)})
            rw.matched()


def _window(rw: Rewriter, node: fx.Node, mask: object, keyword: int, layer: str) -> int:
    """How many tokens a token sees, itself included; 0 for all before it."""
    if mask is None:
        return max(keyword, 0)
    if not isinstance(mask, fx.Node) or mask.target is not dialect.attention_mask.default:
        raise UnsupportedModelError(
            f"{node.name}: the attention {layer} has a mask that Transformers' mask interface "
            f"did not build ({mask}); masks made by the model itself are not supported yet."
        )
    _like, kind, size = mask.args
    if kind not in ("causal", "sliding"):
        raise UnsupportedModelError(
            f"{node.name}: the attention {layer} has a mask that is {kind}; masks of other kinds are not supported yet."
        )
    if kind == "causal":
        # A window at least as long as any sequence hides nothing; the mask says causal then.
        if 0 < keyword < rw.program.facts.max_model_len:
            raise UnsupportedModelError(
                f"{node.name}: the attention {layer} is called with sliding_window={keyword} "
                "and a causal mask; eager and paged attention would differ."
            )
        return 0
    if keyword not in (-1, size):
        raise UnsupportedModelError(
            f"{node.name}: the attention {layer} is called with sliding_window={keyword} and a "
            f"mask of {kind}({size}); eager and paged attention would differ."
        )
    return int(size)  # type: ignore[arg-type]


def _check_shapes(node: fx.Node, q: tuple[object, ...], k: tuple[object, ...], v: tuple[object, ...]) -> None:
    place = f"{node.name} ({module_of(node)})"
    if not len(q) == len(k) == len(v) == 4 or q[0] != 1:
        raise UnsupportedModelError(
            f"{place}: attention operands {list(q)}, {list(k)}, {list(v)} are not [1, heads, tokens, width]."
        )
    if int(q[1]) % int(k[1]) or k[1] != v[1] or q[3] != k[3]:  # type: ignore[call-overload]
        raise UnsupportedModelError(
            f"{place}: {q[1]} query heads of {q[3]}, {k[1]} key heads of {k[3]} and {v[1]} "
            "value heads do not fit together."
        )
    if str(q[2]) != str(k[2]) or str(k[2]) != str(v[2]):
        raise UnsupportedModelError(
            f"{place}: {q[2]} queries see {k[2]} keys; only attention of a row to itself is supported."
        )
