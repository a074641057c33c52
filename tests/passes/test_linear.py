"""Projections by trained weights, on two dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbackend.passes.linear import Linear
from fxbackend.testing import check_pass
from tests.small import start


class Projection(nn.Module):
    """A linear of width 8."""

    def __init__(self, bias: bool = False, width: int = 8):
        super().__init__()
        self.proj = nn.Linear(width, width, bias)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


class PerHead(Projection):
    """One linear of width 4, applied to each head."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.proj(x.view(*x.shape[:2], 2, 4)).reshape(x.shape)


@pytest.mark.parametrize("bias", [False, True])
def test_two_dimensions(bias: bool) -> None:
    program, state = start("linear", Projection(bias))
    after = check_pass(program, Linear(), state, matches=2, tolerance=0.0)
    assert not after.calls(torch.ops.aten.reshape.default)


def test_golden_per_head() -> None:
    program, state = start("linear", PerHead(True, 4))
    check_pass(
        program,
        Linear(),
        state,
        matches=2,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = aten.embedding(embed.weight, input_ids)
        v2: f32[T, 2, 4] = aten.reshape(v1, [v0, 2, 4])
        v3: f32[2*T, 4] = aten.reshape(v2, [-1, 4])
        v4: f32[2*T, 4] = fxbackend.linear(v3, body.proj.weight, body.proj.bias)
        v5: f32[T, 2, 4] = aten.reshape(v4, [-1, 2, 4])
        v6: f32[T, 8] = aten.reshape(v5, [v0, 8])
        v7: f32[T, 11] = fxbackend.linear(v6, head.weight, None)
        return v7
    """,
    )


def test_a_computed_weight_is_left() -> None:
    class Normalised(Projection):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.proj.weight / self.proj.weight.norm(dim=-1, keepdim=True))

    program, state = start("linear", Normalised())
    # The head is the only one.
    check_pass(program, Linear(), state, matches=1)


def test_a_computed_bias_is_left() -> None:
    class Scaled(Projection):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.proj.weight, self.proj.bias * 2)

    program, state = start("linear", Scaled(True))
    check_pass(program, Linear(), state, matches=1)
