"""One spelling each of views, slices, splits, selections and transposes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxbackend.passes.canonicalize_views import CanonicalizeViews
from fxbackend.testing import check_pass
from tests.small import start

View = Callable[[torch.Tensor], torch.Tensor]


class Views(nn.Module):
    """Applies a function to heads `[1, tokens, 2, 4]`."""

    def __init__(self, function: View):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.function(x.unflatten(-1, (2, 4)))
        return out.reshape(1, x.shape[1], -1).sum(-1, keepdim=True) + x


TAIL = ["reshape.default", "sum.dim_IntList", "add.Tensor", "linear.default"]


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (lambda x: x.view(1, -1, 8), ["reshape.default"]),
        (lambda x: x.flatten(2), ["reshape.default"]),
        (lambda x: x.reshape(x.shape), []),
        (lambda x: x[..., :4], []),
        (lambda x: x[..., -3:], ["slice.Tensor"]),
        (lambda x: x[:, :, :, 1:100:2], ["slice.Tensor"]),
        (lambda x: x[..., -1], ["slice.Tensor", "squeeze.dim"]),
        (lambda x: x.chunk(2, -1)[1], ["slice.Tensor"]),
        (lambda x: x.split([1, 3], -1)[1], ["slice.Tensor"]),
        (lambda x: x.split(3, -1)[1], ["slice.Tensor"]),
        (lambda x: x.unbind(2)[1], ["slice.Tensor", "squeeze.dim"]),
        (lambda x: x.permute(0, 2, 1, 3), ["transpose.int"]),
        (lambda x: x.permute(0, 1, 2, 3), []),
        (lambda x: torch.cat((x, x[..., 4:]), -1), []),
        (lambda x: torch.cat((x, x), -1), ["cat.default"]),
    ],
)
def test_one_spelling(function: View, calls: list[str]) -> None:
    program, state = start("canonicalize_views", Views(function))
    after = check_pass(program, CanonicalizeViews(), state, matches=None)
    names = [str(node.target).removeprefix("aten.") for node in after.graph.nodes if node.op == "call_function"]
    assert names[2:] in (["reshape.default", *calls, *TAIL], ["reshape.default", *calls, *TAIL[1:]])


def test_golden() -> None:
    program, state = start("canonicalize_views", Views(lambda x: torch.stack(x.chunk(2, -1)).sum(0)))
    check_pass(
        program,
        CanonicalizeViews(),
        state,
        matches=3,
        golden="""
        input_ids: i64[1, T] = input
        positions: i64[1, T] = input
        v0: T = aten.sym_size.int(input_ids, 1)
        v1: f32[1, T, 8] = aten.embedding(embed.weight, input_ids)
        v2: f32[1, T, 2, 4] = aten.reshape(v1, [1, v0, 2, 4])
        v3: f32[1, T, 2, 2] = aten.slice.Tensor(v2, 3, 0, 2)
        v4: f32[1, T, 2, 2] = aten.slice.Tensor(v2, 3, 2, 4)
        v5: f32[2, 1, T, 2, 2] = aten.stack([v3, v4])
        v6: f32[1, T, 2, 2] = aten.sum.dim_IntList(v5, [0])
        v7: f32[1, T, 4] = aten.reshape(v6, [1, v0, 4])
        v8: f32[1, T, 1] = aten.sum.dim_IntList(v7, [2], True)
        v9: f32[1, T, 8] = aten.add.Tensor(v8, v1)
        v10: f32[1, T, 11] = aten.linear(v9, head.weight)
        return v10
    """,
    )


def test_sizes_name_the_number_of_tokens() -> None:
    program, state = start("canonicalize_views", Views(lambda x: x))
    after = check_pass(program, CanonicalizeViews(), state, matches=2)
    reshape = after.calls(torch.ops.aten.reshape.default)[0]
    (tokens,) = after.calls(torch.ops.aten.sym_size.int)
    assert reshape.args[1] == [1, tokens, 2, 4]


def test_leaves_a_view_of_two_unknown_sizes() -> None:
    program, state = start("canonicalize_views", Views(lambda x: torch.cat((x, x), 1).view(-1, 4).view(-1, 2, 2)))
    after = check_pass(program, CanonicalizeViews(), state, matches=None)
    assert len(after.calls(torch.ops.aten.reshape.default)) >= 2


@pytest.mark.parametrize("width", [7, 11])
def test_a_turned_value_is_not_taken_for_the_same(width: int) -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + x[0].t().reshape(1, x.shape[1], width)  # [width, tokens] -> [1, tokens, width]: a mix

    program, state = start("canonicalize_views", Turned(), width)
    after = check_pass(program, CanonicalizeViews(), state, matches=None)
    assert len(after.calls(torch.ops.aten.reshape.default)) == 1
