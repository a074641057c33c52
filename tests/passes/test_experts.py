"""Calls of Transformers' experts interface become `moe`, their weights turned by the recipes of the slots."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.experts import Experts
from fxbackend.testing import check_pass
from tests.small import start

WIDTH, INNER, EXPERTS = 8, 6, 3


class Routed(nn.Module):
    """Two of three experts, chosen by a linear router."""

    def __init__(self, transposed: bool, interleaved: bool, bias: bool):
        super().__init__()
        self.how = ("silu", 0.0, 0.0, transposed, interleaved)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = (WIDTH, 2 * INNER), (INNER, WIDTH)
        self.gu = nn.Parameter(torch.empty(EXPERTS, *(up if transposed else up[::-1])))
        self.down = nn.Parameter(torch.empty(EXPERTS, *(down if transposed else down[::-1])))
        self.ub = nn.Parameter(torch.empty(EXPERTS, 2 * INNER)) if bias else None
        self.db = nn.Parameter(torch.empty(EXPERTS, WIDTH)) if bias else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, ids = torch.topk(torch.softmax(self.router(flat), -1), 2)
        return self.call(flat, ids, weights).reshape(x.shape)

    def call(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        held = (self.gu, self.down, self.ub, self.db)
        return torch.ops.fxbackend.hf_experts(x, ids, weights, *held, *self.how)


class Twice(Routed):
    """The same experts a second time."""

    def call(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().call(super().call(x, ids, weights), ids, weights)


def test_golden() -> None:
    program, state = start("experts", Routed(True, True, True))
    after = check_pass(
        program,
        Experts(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = aten.embedding(embed.weight, input_ids)
        v2: f32[1, T, 8] = aten.unsqueeze(v1, 0)
        v3: f32[T, 8] = aten.reshape(v2, [v0, 8])
        v4: f32[T, 3] = aten.linear(v3, body.router.weight)
        v5: f32[T, 3] = aten.softmax.int(v4, 1)
        v6: (f32[T, 2], i64[T, 2]) = aten.topk(v5, 2)
        v7: f32[T, 2] = getitem(v6, 0)
        v8: i64[T, 2] = getitem(v6, 1)
        v9: f32[T, 8] = fxbackend.moe(v3, v8, v7, body.gu, body.down, body.ub, body.db, 'silu', 0.0, 0.0)
        v10: f32[1, T, 8] = aten.reshape(v9, [1, v0, 8])
        v11: f32[T, 8] = aten.squeeze.dim(v10, 0)
        v12: f32[T, 11] = aten.linear(v11, head.weight)
        return v12
    """,
    )
    plan = after.weights
    assert plan.slots["body.gu"].shape == (EXPERTS, 2 * INNER, WIDTH)
    recipes = {slot.name: str(slot.pieces[0]) for slot in plan if slot.name.startswith("body.") and slot.pieces}
    assert recipes == {
        "body.router.weight": "body.router.weight",
        "body.gu": "body.gu.T.halves",
        "body.down": "body.down.T",
        "body.ub": "body.ub.halves",
        "body.db": "body.db",
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_layout(transposed: bool, interleaved: bool, bias: bool) -> None:
    program, state = start("experts", Routed(transposed, interleaved, bias))
    after = check_pass(program, Experts(), state, matches=1)
    assert not after.calls(torch.ops.aten.transpose.int, torch.ops.aten.cat.default)


def test_weights_that_are_read_twice_are_turned_in_the_graph() -> None:
    program, state = start("experts", Twice(True, True, True))
    after = check_pass(program, Experts(), state, matches=2)
    assert len(after.calls(torch.ops.aten.transpose.int)) == 4
    assert after.weights.slots["body.gu"].shape == (EXPERTS, WIDTH, 2 * INNER)
