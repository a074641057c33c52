"""The embedding of the ids, and the head with everything that stands behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxbackend.errors import UnsupportedModelError
from fxbackend.passes.vocabulary import Vocabulary
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from fxbackend.testing import VOCABULARY, before, check_pass, program_of

dialect = torch.ops.fxbackend
Tail = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A scaled embedding, one projection and a head; `tail` is what follows it."""

    def __init__(self, tail: Tail = lambda logits: logits, bias: bool = False):
        super().__init__()
        self.embed, self.inner = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8, False)
        self.head = nn.Linear(8, VOCABULARY, bias)
        self.tail = tail

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.tail(self.head(self.inner(self.embed(ids) * 3.0)))


def start(model: nn.Module) -> tuple[Program, dict[str, torch.Tensor]]:
    program = program_of(model)
    return before(default_pipeline(), "vocabulary", program), model.state_dict()


def test_golden() -> None:
    program, state = start(Model(lambda logits: torch.tanh(logits * 0.25 / 5) * 5, bias=True))
    check_pass(
        program,
        Vocabulary(),
        state,
        matches=2,
        tolerance=0.0,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v1: f32[T, 8] = aten.mul.Tensor(v0, 3.0)
        v2: f32[T, 8] = fxbackend.linear(v1, inner.weight, None)
        v3: f32[T, 11] = fxbackend.lm_head(v2, head.weight, head.bias)
        v4: f32[T, 11] = aten.mul.Tensor(v3, 0.25)
        v5: f32[T, 11] = aten.div.Tensor(v4, 5)
        v6: f32[T, 11] = aten.tanh(v5)
        v7: f32[T, 11] = aten.mul.Tensor(v6, 5)
        return v7
    """,
    )


@pytest.mark.parametrize(
    "tail",
    [
        lambda logits: logits[..., :7].repeat(1, 1, 2)[..., :VOCABULARY],
        lambda logits: logits.float() / 0.7,
        lambda logits: logits + torch.arange(VOCABULARY),
    ],
)
def test_arithmetic_behind_the_head_is_kept(tail: Tail) -> None:
    program, state = start(Model(tail))
    check_pass(program, Vocabulary(), state, matches=2, tolerance=0.0)


def test_a_tied_head_reads_the_slot_of_the_embedding() -> None:
    class Tied(Model):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.inner(self.embed(ids)), self.embed.weight)

    program, state = start(Tied())
    after = check_pass(program, Vocabulary(), state, matches=2)
    (embedding,), (head,) = after.calls(dialect.embedding.default), after.calls(dialect.lm_head.default)
    assert embedding.args[1] is head.args[1]


def test_a_lookup_by_something_else_stays() -> None:
    class Positions(Model):
        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids) + self.embed(positions % VOCABULARY))

    program, state = start(Positions())
    after = check_pass(program, Vocabulary(), state, matches=2)
    assert len(after.calls(torch.ops.aten.embedding.default)) == 1


class Around(Model):
    """The ids reach the logits around the head."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) + ids.unsqueeze(-1)


class TwoHeads(Model):
    """Two linears behind the output."""

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) + self.head(self.inner(self.embed(ids)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Around, "depends on input_ids by a way around the language-model head"),
        (TwoHeads, "has 2 linears behind it"),
    ],
)
def test_raises_where_there_is_no_one_head(model: type[Model], message: str) -> None:
    program, _state = start(model())
    with pytest.raises(UnsupportedModelError, match=message):
        check_pass(program, Vocabulary(), _state, matches=0)
