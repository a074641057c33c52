"""In-place ops become values; what would change the meaning is left and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.errors import VerifyError
from fxbackend.passes.functionalize import Functionalize
from fxbackend.pipeline import Pipeline
from fxbackend.pipelines import default_pipeline
from fxbackend.testing import Wrapped, check_pass, program_of
from tests.small import start


class InPlace(nn.Module):
    """Writes to a fresh value; whoever reads it later sees what was written."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scores = x * 2
        early = scores.sum(-1, keepdim=True)
        scores.div_(3.0).add_(x).clamp_(-1, 1)
        return scores * early


def test_golden() -> None:
    program, state = start("functionalize", InPlace())
    check_pass(
        program,
        Functionalize(),
        state,
        matches=3,
        golden="""
        input_ids: i64[1, T] = input
        positions: i64[1, T] = input
        v0: f32[1, T, 8] = aten.embedding(embed.weight, input_ids)
        v1: f32[1, T, 8] = aten.mul.Tensor(v0, 2)
        v2: f32[1, T, 1] = aten.sum.dim_IntList(v1, [-1], True)
        v3: f32[1, T, 8] = aten.div.Tensor(v1, 3.0)
        v4: f32[1, T, 8] = aten.add.Tensor(v3, v0)
        v5: f32[1, T, 8] = aten.clamp(v4, -1, 1)
        v6: f32[1, T, 8] = aten.mul.Tensor(v5, v2)
        v7: f32[1, T, 11] = aten.linear(v6, head.weight)
        return v7
    """,
    )


def test_the_dtype_of_the_written_value_stays() -> None:
    class Narrow(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return (x * 2).add_(x.float().exp())

    program, state = start("functionalize", Narrow(), dtype=torch.bfloat16)
    after = check_pass(program, Functionalize(), state, matches=1, tolerance=1e-2)
    (added,) = [node for node in after.calls(torch.ops.aten.to.dtype) if node.args[1] is torch.bfloat16]
    assert added.args[0].target is torch.ops.aten.add.Tensor


def test_a_view_that_is_made_afterwards_sees_the_new_value() -> None:
    class View(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            fresh = (x + 1).view(-1, 4)
            fresh.mul_(2)
            return fresh.view(x.shape)

    program, state = start("functionalize", View())
    check_pass(program, Functionalize(), state, matches=1)


class WritesThroughView(nn.Module):
    """The base is read after one of its views was written to."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        fresh = x + 1
        fresh[..., :4].mul_(2)
        return fresh


class WritesToWeight(nn.Module):
    """A buffer is counted up."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + self.seen.add_(1)


class EarlierView(nn.Module):
    """A view made before the write is read after it."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        fresh = x + 1
        view = fresh[..., :4]
        fresh.mul_(2)
        return torch.cat((view, view), -1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (WritesThroughView, "shares the memory that it writes to and is read later"),
        (WritesToWeight, "it writes to body.seen"),
        (EarlierView, "shares the memory that it writes to and is read later"),
    ],
)
def test_refusals(body: type[nn.Module], reason: str) -> None:
    model = Wrapped(body(), 8)
    program = program_of(model)
    after = Pipeline((Functionalize(),)).run(program, partial=True)
    assert after.history[-1].matches == 0
    assert [reason in refusal.reason for refusal in after.history[-1].refusals] == [True]
    with pytest.raises(VerifyError, match="writes to its operand"):
        default_pipeline().run(program)
