"""What counts the tokens of a row becomes positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.errors import UnsupportedModelError
from fxbackend.passes.positions import Positions
from fxbackend.pipelines import default_pipeline
from fxbackend.testing import Wrapped, check_pass, program_of
from tests.small import Body, start


def row(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device)


class Learned(Body):
    """Learned positions by `count(x)` `[1, tokens]`."""

    def __init__(self) -> None:
        super().__init__(table=nn.Embedding(32, 8))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + self.table(self.count(x))


class Arange(Learned):
    def count(self, x: torch.Tensor) -> torch.Tensor:
        return row(x).unsqueeze(0)


class Offset(Learned):
    """OPT and BART count from 2."""

    def count(self, x: torch.Tensor) -> torch.Tensor:
        return row(x).unsqueeze(0) + 2


class RunningSum(Learned):
    """BioGPT sums a mask of ones."""

    def count(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.long)
        return torch.cumsum(mask, dim=1) * mask + 1


class Backwards(Learned):
    """Counts from the end: no position of an engine."""

    def count(self, x: torch.Tensor) -> torch.Tensor:
        return (x.shape[1] - row(x)).unsqueeze(0)


@pytest.mark.parametrize("body", [Arange, Offset, RunningSum], ids=lambda each: each.__name__)
def test_counting_becomes_positions(body: type[Learned]) -> None:
    program, state = start("positions", body())
    after = check_pass(program, Positions(), state, matches=None)
    assert not after.calls(torch.ops.aten.arange.default, torch.ops.aten.cumsum.default)


def test_a_second_sequence_counts_from_its_own_start() -> None:
    model = Wrapped(Offset(), 8)
    program = default_pipeline().run(program_of(model))
    ids = torch.tensor([1, 2, 3, 4, 5])
    weights = program.weights.materialise(model.state_dict())
    logits = program.run({"input_ids": ids, "positions": torch.tensor([0, 1, 2, 0, 1])}, weights)
    with torch.no_grad():
        torch.testing.assert_close(logits[3:], model(ids[None, 3:], None)[0])


def test_what_counts_otherwise_is_left_and_refused_by_the_proof_of_rows() -> None:
    program, state = start("positions", Backwards())
    check_pass(program, Positions(), state, matches=None)
    with pytest.raises(UnsupportedModelError, match="computes with the number of tokens"):
        default_pipeline().run(program_of(Wrapped(Backwards(), 8)))
