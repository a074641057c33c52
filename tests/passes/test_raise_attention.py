"""Attention written by hand: the spellings that are one, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fxbackend.errors import UnsupportedModelError
from fxbackend.passes.raise_attention import RaiseAttention
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from fxbackend.testing import Wrapped, check_pass, program_of
from tests.small import Body, start

HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE


class ByHand(Body):
    """Attention as people write it; subclasses change one step."""

    kv_heads = HEADS

    def __init__(self) -> None:
        kv = self.kv_heads * SIZE
        super().__init__(
            q=nn.Linear(WIDTH, WIDTH), k=nn.Linear(WIDTH, kv), v=nn.Linear(WIDTH, kv), o=nn.Linear(WIDTH, WIDTH)
        )

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(1, x.shape[1], -1, SIZE).transpose(1, 2)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(SIZE)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        length = scores.shape[-1]
        return scores.masked_fill(torch.triu(torch.ones(length, length, dtype=torch.bool), 1), float("-inf"))

    def weigh(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.softmax(scores.float(), -1).to(v.dtype), v)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(each(x)) for each in (self.q, self.k, self.v))
        out = self.weigh(self.mask(self.scores(q, self.repeat(k))), self.repeat(v))
        return self.o(out.transpose(1, 2).reshape(1, x.shape[1], WIDTH))


class Flat(ByHand):
    """bmm over [heads, tokens, width]."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q[0], k[0].transpose(1, 2)).unsqueeze(0) * SIZE**-0.5


class BiasInTheProduct(ByHand):
    """baddbmm with ALiBi as what is added (Bloom)."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        bias = (slopes[:, None] * torch.arange(k.shape[2]))[:, None, :].expand(-1, q.shape[2], -1)
        return torch.baddbmm(bias, q[0], k[0].transpose(1, 2), beta=1.0, alpha=SIZE**-0.5).unsqueeze(0)


class Capped(ByHand):
    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return 5.0 * torch.tanh(super().scores(q, k) / 5.0)


class Window(ByHand):
    """A window in a buffer of booleans (GPT-Neo), the mask added."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.ones(32, 32, dtype=torch.bool)
        self.register_buffer("seen", torch.tril(whole) ^ torch.tril(whole, -4))

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        length = scores.shape[-1]
        seen = self.seen[:length, :length]
        return torch.where(seen, scores, torch.tensor(-1e9))


class Grouped(ByHand):
    """Two key heads, repeated by expand."""

    kv_heads = 2

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, None].expand(1, 2, 2, x.shape[2], SIZE).reshape(1, HEADS, x.shape[2], SIZE)


class Interleaved(Grouped):
    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, dim=1)


class Dropped(ByHand):
    """Weights through a dropout in evaluation mode and a second softmax-free cast."""

    def weigh(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.matmul(nn.functional.dropout(torch.softmax(scores, -1), 0.1, self.training), v)


def attention(program: Program) -> tuple[object, ...]:
    (node,) = program.calls(torch.ops.fxbackend.attention.default)
    return tuple(each.meta["val"].shape[1] for each in node.args[:2]) + node.args[4:7]


SCALE = round(SIZE**-0.5, 7)
SPELLINGS = [
    (ByHand, (4, 4, SCALE, 0, 0.0)),
    (Flat, (4, 4, SCALE, 0, 0.0)),
    (BiasInTheProduct, (4, 4, SCALE, 0, 0.0)),
    (Capped, (4, 4, SCALE, 0, 5.0)),
    (Window, (4, 4, SCALE, 4, 0.0)),
    (Grouped, (4, 2, SCALE, 0, 0.0)),
    (Interleaved, (4, 2, SCALE, 0, 0.0)),
    (Dropped, (4, 4, SCALE, 0, 0.0)),
]


@pytest.mark.parametrize(("body", "expected"), SPELLINGS, ids=lambda each: getattr(each, "__name__", ""))
def test_spellings_are_one_attention(body: type[ByHand], expected: tuple[object, ...]) -> None:
    program, state = start("raise_attention", body(), WIDTH)
    after = check_pass(program, RaiseAttention(), state, matches=1, tolerance=1e-4)
    assert attention(after) == pytest.approx(expected, rel=1e-3)


def test_alibi_is_read_as_slopes() -> None:
    program, state = start("raise_attention", BiasInTheProduct(), WIDTH)
    after = check_pass(program, RaiseAttention(), state, matches=1, tolerance=1e-4)
    torch.testing.assert_close(after.weights.constants["alibi_slopes_0"], torch.tensor([0.5, 0.25, 0.125, 0.0625]))


@pytest.mark.parametrize("body", [body for body, _expected in SPELLINGS], ids=lambda each: each.__name__)
def test_sequences_of_a_row_do_not_see_each_other(body: type[ByHand]) -> None:
    from fxbackend.ops import sequences

    model = Wrapped(body(), WIDTH)
    program = default_pipeline().run(program_of(model))
    ids = torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(3))
    positions = torch.cat((torch.arange(7), torch.arange(5)))
    with sequences((7, 5)), torch.no_grad():
        logits = program.run(
            {"input_ids": ids, "positions": positions}, program.weights.materialise(model.state_dict())
        )
        alone = torch.cat([model(part[None], None)[0] for part in ids.split((7, 5))])
    torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)


class Router(Body):
    """A softmax with no product behind it."""

    def __init__(self) -> None:
        super().__init__(gate=nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x * torch.softmax(self.gate(x), -1)


def test_a_router_is_no_attention() -> None:
    program, state = start("raise_attention", Router(), WIDTH)
    check_pass(program, RaiseAttention(), state, matches=0)


class Read(ByHand):
    """The weights are read a second time."""

    def weigh(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(scores, -1)
        return torch.matmul(weights, v) + weights.sum(-1, keepdim=True)


class ReadScores(ByHand):
    def weigh(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return super().weigh(scores, v) * torch.sigmoid(torch.logsumexp(scores, -1, keepdim=True))


class BothWays(ByHand):
    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


class TrainedBias(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(HEADS, 1, 1))

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().scores(q, k) + self.slope * torch.arange(k.shape[2])


class HiddenBias(ByHand):
    """A bias made from hidden states (Inkling)."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().scores(q, k) + k.sum(-1).unsqueeze(2)


REFUSED = [
    (Read, "users"),
    (ReadScores, "read elsewhere"),
    (BothWays, "neither causal"),
    (TrainedBias, "trained weight"),
    (HiddenBias, "two values of the hidden states"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_no_paged_attention_computes_is_refused(body: type[ByHand], reason: str) -> None:
    program, state = start("raise_attention", body(), WIDTH)
    check_pass(program, RaiseAttention(), state, matches=0, refusals=[reason])
    with pytest.raises(UnsupportedModelError, match="relates every token to every other"):
        default_pipeline().run(program_of(Wrapped(body(), WIDTH)))
