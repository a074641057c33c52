"""Views that undo each other go, views of views are one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxbackend.passes.simplify_views import SimplifyViews
from fxbackend.testing import check_pass
from tests.small import start

View = Callable[[torch.Tensor], torch.Tensor]


class Views(nn.Module):
    """Applies a function to `[1, tokens, 8]`; the dot keeps the views in the graph."""

    def __init__(self, function: View):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.function(x.exp()).exp().reshape(x.shape)


@pytest.mark.parametrize(
    ("function", "matches", "left"),
    [
        (lambda x: x.transpose(1, 2).transpose(1, 2), 1, []),
        (lambda x: x.transpose(1, 2).transpose(2, 1).transpose(1, 2), 1, ["transpose.int"]),
        (lambda x: x.unsqueeze(2).squeeze(2), 1, []),
        (lambda x: x.view(1, -1, 2, 4).view(1, -1, 8), 1, []),
        (lambda x: x.view(1, -1, 2, 4).view(1, -1, 4, 2), 1, ["reshape.default"]),
        (lambda x: x.unsqueeze(2).view(1, -1, 4, 2), 1, ["reshape.default"]),
        (lambda x: x.view(1, -1, 2, 4).transpose(1, 2), 0, ["reshape.default", "transpose.int"]),
        (
            lambda x: x.view(1, -1, 2, 4).transpose(1, 2).reshape(1, -1, 8),
            0,
            ["reshape.default", "transpose.int", "reshape.default"],
        ),
    ],
)
def test_what_is_left(function: View, matches: int, left: list[str]) -> None:
    program, state = start("simplify_views", Views(function))
    after = check_pass(program, SimplifyViews(), state, matches=matches, tolerance=0.0)
    names = [str(node.target).removeprefix("aten.") for node in after.graph.nodes if node.op == "call_function"]
    first, last = (index for index, name in enumerate(names) if name == "exp.default")
    assert names[first + 1 : last] == left


def test_golden() -> None:
    program, state = start(
        "simplify_views", Views(lambda x: x.view(1, -1, 2, 4).transpose(2, 3).transpose(2, 3).view(1, -1, 4, 2))
    )
    check_pass(
        program,
        SimplifyViews(),
        state,
        matches=2,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v2: f32[T, 8] = aten.exp(v1)
        v3: f32[T, 4, 2] = aten.reshape(v2, [v0, 4, 2])
        v4: f32[T, 4, 2] = aten.exp(v3)
        v5: f32[T, 8] = aten.reshape(v4, [v0, 8])
        v6: f32[T, 11] = fxbackend.lm_head(v5, head.weight, None)
        return v6
    """,
    )


def test_a_value_in_between_that_is_read_elsewhere_stays() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        turned = x.transpose(1, 2)
        return turned.transpose(1, 2) + turned.sum(1).unsqueeze(-1)

    program, state = start("simplify_views", Views(both))
    after = check_pass(program, SimplifyViews(), state, matches=1)
    assert len(after.calls(torch.ops.aten.transpose.int)) == 1
