"""Root-mean-square norms, with and without a residual addition before them."""

from __future__ import annotations

import torch

from fxbackend.ops.registry import dialect_op


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if cast == "before":
        return (offset + weight if offset else weight) * normed.to(x.dtype)
    scale = offset + weight.float() if offset else weight.float()
    return (normed * scale).to(x.dtype)


def _rms_norm_shape(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str) -> torch.Tensor:
    return torch.empty_like(x)


def _add_rms_norm_shape(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@dialect_op(shape=_rms_norm_shape)
def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str) -> torch.Tensor:
    """`y = x / sqrt(mean(x^2) + eps) * (offset + weight)`: x `[..., W]`, weight `[W]` or None -> `[..., W]`.

    Statistics are float32. `cast="before"` casts to x's dtype before the multiplication (Llama), `"after"` multiplies
    in float32 (Gemma with offset 1, Olmo2 with offset 0); they differ in bfloat16 only.
    """
    return _rms_norm(x, weight, eps, offset, cast)


@dialect_op(shape=_add_rms_norm_shape)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, cast: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`s = x + residual; y = rms_norm(s)`: both `[T, W]` -> `(y, s)`, each `[T, W]`."""
    total = x + residual
    return _rms_norm(total, weight, eps, offset, cast), total
