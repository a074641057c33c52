"""One spelling each of casts, scalars, sizes and dimensions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbackend.errors import VerifyError
from fxbackend.passes.canonicalize import Canonicalize
from fxbackend.pipelines import default_pipeline
from fxbackend.testing import Wrapped, before, check_pass, program_of
from tests.small import start

aten = torch.ops.aten


class NoOps(nn.Module):
    """Nothing here computes anything but the power and the mean."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = F.dropout(x, 0.5, training=False).to(torch.float32).contiguous().clone().detach()
        y = (y * 1.0 + 0) / 1
        power = torch.square(y) + y * y + y.pow(2)
        return power.mean(-1, keepdim=True).expand(power.shape[0], power.shape[1], 1) * x.to(x.device)


def test_golden() -> None:
    program, state = start("canonicalize", NoOps())
    check_pass(
        program,
        Canonicalize(),
        state,
        matches=13,
        golden="""
        input_ids: i64[1, T] = input
        positions: i64[1, T] = input
        v0: f32[1, T, 8] = aten.embedding(embed.weight, input_ids)
        v1: f32[1, T, 8] = aten.pow.Tensor_Scalar(v0, 2)
        v2: f32[1, T, 8] = aten.pow.Tensor_Scalar(v0, 2)
        v3: f32[1, T, 8] = aten.add.Tensor(v1, v2)
        v4: f32[1, T, 8] = aten.pow.Tensor_Scalar(v0, 2)
        v5: f32[1, T, 8] = aten.add.Tensor(v3, v4)
        v6: f32[1, T, 1] = aten.mean.dim(v5, [2], True)
        v7: f32[1, T, 8] = aten.mul.Tensor(v6, v0)
        v8: f32[1, T, 11] = aten.linear(v7, head.weight)
        return v8
    """,
    )


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.to(dtype=torch.float32, device="cpu"),
        lambda x: x.type_as(torch.empty(0, dtype=torch.float32, device="cpu")),
    ],
    ids=["float", "to", "type", "to device", "type_as"],
)
def test_casts_have_one_spelling(cast: object) -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return cast(x).exp().to(x.dtype)  # type: ignore[operator]

    model = Wrapped(Casts(), 8)
    program = before(default_pipeline(), "canonicalize_views", program_of(model, dtype=torch.bfloat16))
    wide, back = program.calls(aten.to.dtype)
    assert wide.args[1:] == (torch.float32,) and back.args[1:] == (torch.bfloat16,) and not wide.kwargs


def test_a_cast_that_changes_something_stays() -> None:
    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x.to(torch.bfloat16).to(torch.float32)

    program, state = start("canonicalize", Rounded())
    after = check_pass(program, Canonicalize(), state, matches=0)
    assert len(after.calls(aten.to.dtype)) == 2


def test_a_multiplication_that_changes_the_dtype_stays() -> None:
    class Promoted(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + positions.unsqueeze(-1) * 1.0

    program, state = start("canonicalize", Promoted())
    after = check_pass(program, Canonicalize(), state, matches=1)
    assert len(after.calls(aten.mul.Tensor)) == 1


def test_dropout_in_training_mode_is_named() -> None:
    class Training(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return F.dropout(x, 0.5, training=True)

    with pytest.raises(VerifyError, match=r"aten.dropout.*in body: canonicalize must have removed this spelling"):
        default_pipeline().run(program_of(Wrapped(Training(), 8)))
