"""Ops that do several things become ops that do one."""

from __future__ import annotations

import pytest
import torch

from fxbackend.passes.decompose import Decompose
from fxbackend.testing import check_pass
from tests.small import Body, start


class Added(Body):
    """`beta b + alpha x y` over one batch."""

    def __init__(self, beta: float, alpha: float):
        super().__init__()
        self.factors = {"beta": beta, "alpha": alpha}

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(x, x, torch.ones(1, 8, 8), **self.factors)


@pytest.mark.parametrize(
    ("beta", "alpha", "ops"), [(1, 1, (0, 1)), (1, 0.25, (1, 1)), (0.5, 2, (2, 1)), (0, 0.25, (1, 0))]
)
def test_baddbmm(beta: float, alpha: float, ops: tuple[int, int]) -> None:
    program, state = start("decompose", Added(beta, alpha))
    after = check_pass(program, Decompose(), state, matches=1)
    assert (len(after.calls(torch.ops.aten.mul.Tensor)), len(after.calls(torch.ops.aten.add.Tensor))) == ops
    assert not after.calls(torch.ops.aten.baddbmm.default)
