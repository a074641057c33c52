"""One projection for q, k and v, found from the attention's operands, whatever lies between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.fuse_qkv import FuseQkv
from fxbackend.testing import check_pass
from tests.small import Norm, SelfAttention, start

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("bias", [False, True])
def test_separate_projections(bias: bool) -> None:
    program, state = start("fuse_qkv", SelfAttention(bias=bias))
    after = check_pass(program, FuseQkv(), state, matches=1)
    slot = after.weights.slots["body.qkv_proj.weight"]
    assert slot.sections == (8, 4, 4) and [piece.source for piece in slot.pieces] == [
        "body.q_proj.weight",
        "body.k_proj.weight",
        "body.v_proj.weight",
    ]
    assert ("body.qkv_proj.bias" in after.weights.slots) is bias


def test_golden() -> None:
    program, state = start("fuse_qkv", SelfAttention(bias=True))
    check_pass(
        program,
        FuseQkv(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v2: (f32[T, 8], f32[T, 4], f32[T, 4]) = fxbackend.qkv(v1, body.qkv_proj.weight, body.qkv_proj.bias, 8, 4, 4)
        v3: f32[T, 8] = getitem(v2, 0)
        v4: f32[T, 4] = getitem(v2, 1)
        v5: f32[T, 4] = getitem(v2, 2)
        v6: f32[T, 2, 4] = aten.reshape(v3, [v0, 2, 4])
        v7: f32[T, 1, 4] = aten.reshape(v4, [v0, 1, 4])
        v8: f32[T, 1, 4] = aten.reshape(v5, [v0, 1, 4])
        v9: f32[T, 2, 4] = fxbackend.rope(v6, positions, rope_table_0_1, False)
        v10: f32[T, 1, 4] = fxbackend.rope(v7, positions, rope_table_0_1, False)
        v11: f32[T, 2, 4] = fxbackend.attention(v9, v10, v8, None, 0.5, 0, 0.0)
        v12: f32[T, 8] = aten.reshape(v11, [v0, 8])
        v13: f32[T, 8] = fxbackend.linear(v12, body.o_proj.weight, None)
        v14: f32[T, 11] = fxbackend.lm_head(v13, head.weight, None)
        return v14
    """,
    )


class Packed(SelfAttention):
    """Phi-3: one linear, three parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16, True)
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x: torch.Tensor) -> Projected:
        packed = self.qkv(x)
        return packed[..., :8], packed[..., 8:12], packed[..., 12:]


def test_packed_projection() -> None:
    program, state = start("fuse_qkv", Packed())
    after = check_pass(program, FuseQkv(), state, matches=1)
    assert [str(piece) for piece in after.weights.slots["body.qkv.weight"].pieces] == [
        "body.qkv.weight[0:8]",
        "body.qkv.weight[8:12]",
        "body.qkv.weight[12:16]",
    ]
    assert after.weights.slots["body.qkv.bias"].sections == (8, 4, 4)


class Normed(SelfAttention):
    """Norms of each head, by one weight (Qwen3) or one per head (StableLM), clipped (OLMo), and only then rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(4), nn.LayerNorm(4)])

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [norm(head) for norm, head in zip(self.norms, q.split(1, 1), strict=True)]
        return super().rotate(torch.cat(parts, 1), self.norms[0](k).clamp(-2, 2), positions)


def test_whatever_lies_between_does_not_matter() -> None:
    program, state = start("fuse_qkv", Normed())
    check_pass(program, FuseQkv(), state, matches=1)


class OtherInput(SelfAttention):
    """k and v are projections of another value than q."""

    def project(self, x: torch.Tensor) -> Projected:
        return self.q_proj(x), self.k_proj(x + 1), self.v_proj(x)


class HalfBias(SelfAttention):
    """Only v has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.v_proj = nn.Linear(8, 4, True)


class SharedWeight(SelfAttention):
    """k and v are one projection with one weight, applied twice."""

    def project(self, x: torch.Tensor) -> Projected:
        return self.q_proj(x), self.k_proj(x), nn.functional.linear(x, self.k_proj.weight, None)


class KeyIsValue(SelfAttention):
    """v is k before its rotation (Gemma 4's full attention)."""

    def project(self, x: torch.Tensor) -> Projected:
        k = self.k_proj(x)
        return self.q_proj(x), k, k


class Gated(SelfAttention):
    """q is the product of two projections."""

    def project(self, x: torch.Tensor) -> Projected:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x) * self.k_proj(x).sigmoid()


class NoProjection(SelfAttention):
    """v is the hidden state itself."""

    def project(self, x: torch.Tensor) -> Projected:
        return self.q_proj(x), self.k_proj(x), x[..., :4]


class PackedOutOfOrder(Packed):
    """v stands first."""

    def project(self, x: torch.Tensor) -> Projected:
        packed = self.qkv(x)
        return packed[..., 4:12], packed[..., 12:], packed[..., :4]


class TwoPacked(Packed):
    """q comes from one packed projection, k and v from another."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(8, 8)

    def project(self, x: torch.Tensor) -> Projected:
        packed = self.kv(x)
        return self.qkv(x)[..., :8], packed[..., :4], packed[..., 4:]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (OtherInput, "projections of different values"),
        (HalfBias, "some of q, k and v have a bias"),
        (SharedWeight, "is read elsewhere as well"),
        (KeyIsValue, "come from one linear"),
        (Gated, "v of this attention does not come from one linear"),
        (NoProjection, "v of this attention does not come from one linear"),
        (PackedOutOfOrder, "not the first, second and third part"),
        (TwoPacked, "parts of different linears"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_refusals(form: type[SelfAttention], reason: str) -> None:
    program, state = start("fuse_qkv", form())
    check_pass(program, FuseQkv(), state, matches=0, refusals=[reason])


def test_refuses_a_packed_projection_that_is_read_elsewhere() -> None:
    class Shown(Packed):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            packed = self.qkv(x)
            self.project = lambda _x: (packed[..., :8], packed[..., 8:12], packed[..., 12:])  # type: ignore[method-assign]
            return super().forward(x, positions) + packed[..., 2:10]

    program, state = start("fuse_qkv", Shown())
    check_pass(program, FuseQkv(), state, matches=0, refusals=["or its weight is read elsewhere as well"])
