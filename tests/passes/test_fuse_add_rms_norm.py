"""Residual addition and norm in one op."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.fuse_add_rms_norm import FuseAddRmsNorm
from fxbackend.testing import check_pass
from tests.small import Norm, start


class Residual(nn.Module):
    """A pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, False)
        self.norm = Norm(8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        total = x + self.inner(x)
        return total + self.inner(self.norm(total))


def test_the_sum_is_a_second_result() -> None:
    program, state = start("fuse_add_rms_norm", Residual())
    check_pass(
        program,
        FuseAddRmsNorm(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v1: f32[T, 8] = fxbackend.linear(v0, body.inner.weight, None)
        v2: (f32[T, 8], f32[T, 8]) = fxbackend.add_rms_norm(v1, v0, body.norm.weight, 1e-05, 0.0, 'before')
        v3: f32[T, 8] = getitem(v2, 0)
        v4: f32[T, 8] = getitem(v2, 1)
        v5: f32[T, 8] = fxbackend.linear(v3, body.inner.weight, None)
        v6: f32[T, 8] = aten.add.Tensor(v4, v5)
        v7: f32[T, 11] = fxbackend.lm_head(v6, head.weight, None)
        return v7
    """,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_a_bit_changes(dtype: torch.dtype) -> None:
    program, state = start("fuse_add_rms_norm", Residual(), dtype=dtype)
    check_pass(program, FuseAddRmsNorm(), state, matches=1, tolerance=0.0)


def test_a_sum_that_nothing_else_reads() -> None:
    class Last(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.inner(x))

    program, state = start("fuse_add_rms_norm", Last())
    check_pass(program, FuseAddRmsNorm(), state, matches=1)


def test_a_user_between_the_sum_and_the_norm() -> None:
    class Between(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            total = x + self.inner(x)
            early = self.inner(total)
            return early + self.norm(total)

    program, state = start("fuse_add_rms_norm", Between())
    check_pass(program, FuseAddRmsNorm(), state, matches=1)


def test_two_norms_of_one_sum_are_fused_once() -> None:
    class Two(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            total = x + self.inner(x)
            return self.norm(total) * self.inner(self.norm(total))

    program, state = start("fuse_add_rms_norm", Two())
    after = check_pass(program, FuseAddRmsNorm(), state, matches=1)
    assert len(after.calls(torch.ops.fxbackend.rms_norm.default)) == 1


def test_refuses_a_number() -> None:
    class Number(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.norm(self.inner(x) + 0.5)

    program, state = start("fuse_add_rms_norm", Number())
    check_pass(program, FuseAddRmsNorm(), state, matches=0, refusals=["which is not a tensor"])


def test_refuses_different_shapes() -> None:
    class Broadcast(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.norm(self.inner(x) + x.sum(-1, keepdim=True))

    program, state = start("fuse_add_rms_norm", Broadcast())
    check_pass(program, FuseAddRmsNorm(), state, matches=0, refusals=["the sum adds"])


def test_refuses_a_sum_per_head() -> None:
    class Heads(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Norm(4)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            shape = (*x.shape[:2], 2, 4)
            return self.norm(self.inner(x).view(shape) + x.view(shape)).reshape(x.shape)

    program, state = start("fuse_add_rms_norm", Heads())
    check_pass(program, FuseAddRmsNorm(), state, matches=0, refusals=["the sum adds"])


def test_a_difference_is_no_sum() -> None:
    class Difference(Residual):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.add(x, self.inner(x), alpha=-2))

    program, state = start("fuse_add_rms_norm", Difference())
    check_pass(program, FuseAddRmsNorm(), state, matches=0)
