"""The rotations of q and k in one op."""

from __future__ import annotations

import torch

from fxbackend.passes.fuse_rope import FuseRope
from fxbackend.testing import check_pass
from tests.small import Angles, SelfAttention, rotate_half, start


def test_golden() -> None:
    program, state = start("fuse_rope", SelfAttention())
    check_pass(
        program,
        FuseRope(),
        state,
        matches=1,
        tolerance=0.0,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v2: (f32[T, 8], f32[T, 4], f32[T, 4]) = fxbackend.qkv(v1, body.qkv_proj.weight, None, 8, 4, 4)
        v3: f32[T, 8] = getitem(v2, 0)
        v4: f32[T, 4] = getitem(v2, 1)
        v5: f32[T, 4] = getitem(v2, 2)
        v6: f32[T, 2, 4] = aten.reshape(v3, [v0, 2, 4])
        v7: f32[T, 1, 4] = aten.reshape(v4, [v0, 1, 4])
        v8: f32[T, 1, 4] = aten.reshape(v5, [v0, 1, 4])
        v9: (f32[T, 2, 4], f32[T, 1, 4]) = fxbackend.rope_qk(v6, v7, positions, rope_table_0_1, False)
        v10: f32[T, 2, 4] = getitem(v9, 0)
        v11: f32[T, 1, 4] = getitem(v9, 1)
        v12: f32[T, 2, 4] = fxbackend.attention(v10, v11, v8, None, 0.5, 0, 0.0)
        v13: f32[T, 8] = aten.reshape(v12, [v0, 8])
        v14: f32[T, 8] = fxbackend.linear(v13, body.o_proj.weight, None)
        v15: f32[T, 11] = fxbackend.lm_head(v14, head.weight, None)
        return v15
    """,
    )


def test_an_attention_without_rope_is_left() -> None:
    class NoRope(SelfAttention):
        def rotate(
            self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return q, k

    program, state = start("fuse_rope", NoRope())
    check_pass(program, FuseRope(), state, matches=0)


def test_refuses_different_tables() -> None:
    class Different(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.others = Angles(4, base=50.0)

        def rotate(
            self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = (each.unsqueeze(1) for each in self.others(q, positions))
            return super().rotate(q, k, positions)[0], k * cos + rotate_half(k) * sin

    program, state = start("fuse_rope", Different())
    check_pass(program, FuseRope(), state, matches=0, refusals=["over different tables"])


def test_refuses_a_rotated_value_that_is_read_elsewhere() -> None:
    class Shown(SelfAttention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return super().attend(q, k, v) + q.transpose(1, 2)

    program, state = start("fuse_rope", Shown())
    check_pass(program, FuseRope(), state, matches=0, refusals=["is read elsewhere as well"])
