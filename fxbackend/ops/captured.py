"""What Transformers' own dispatch points leave in a captured graph, before any pass has looked at it."""

from __future__ import annotations

import torch

from fxbackend.ops.registry import dialect_op


def _hf_attention_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    layer: str,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@dialect_op(shape=_hf_attention_shape)
def hf_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
    window: int,
    layer: str,
) -> torch.Tensor:
    """`y = softmax(cap(scale q k^T) + mask) v`, as called through Transformers' attention interface.

    q `[1, Hq, T, D]`, k `[1, Hkv, T, D]`, v `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`. `mask` is the value of
    `attention_mask` below, None when the model built none; `window` is the keyword `sliding_window`, -1 when the call
    did not pass it.
    """
    from fxbackend.ops.attention import attention

    limit = max(window, 0) if mask is None else int(mask.flatten()[0])
    out = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), sinks, scale, limit, softcap)
    return out.unsqueeze(0)


def _mask_shape(like: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    return like.new_empty(1, 1, 1, 1, dtype=torch.int64)


@dialect_op(shape=_mask_shape)
def attention_mask(like: torch.Tensor, kind: str, size: int) -> torch.Tensor:
    """`mask = causal` or `sliding(size)`: the rule of a mask that Transformers asked for, as a value `[1, 1, 1, 1]`.

    The tensor itself is only the carrier of the edge from the mask to the attentions that use it; `kind` is `causal`
    (size 0), `sliding` (a token sees itself and the size - 1 before it), or a sentence that says why it is neither.
    """
    return torch.full((1, 1, 1, 1), size, dtype=torch.int64, device=like.device)
