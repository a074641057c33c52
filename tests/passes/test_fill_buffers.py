"""Buffers that are filled part by part become concatenations; what is not filled so is left and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.fill_buffers import FillBuffers
from fxbackend.testing import check_pass
from tests.small import start


class Filled(nn.Module):
    """DeepSeek V3's keys: two parts of a fresh tensor, the second one expanded."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buffer = x.new_empty(*x.shape[:-1], 12)
        buffer[..., :8].copy_(x)
        buffer[..., 8:].copy_(x[..., :1].expand(-1, -1, 4))
        return buffer * 2


class Backwards(nn.Module):
    """The second part first, broadcast and cast by the write."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(*x.shape[:-1], 12)
        buffer[..., 4:] = x
        buffer[..., :4] = positions.unsqueeze(-1)
        return buffer * 2


def test_golden() -> None:
    program, state = start("fill_buffers", Filled(), out_width=12)
    check_pass(
        program,
        FillBuffers(),
        state,
        matches=1,
        golden="""
        input_ids: i64[1, T] = input
        positions: i64[1, T] = input
        v0: f32[1, T, 8] = aten.embedding(embed.weight, input_ids)
        v1: f32[1, T, 1] = aten.slice.Tensor(v0, 2, 0, 1)
        v2: f32[1, T, 4] = aten.expand(v1, [-1, -1, 4])
        v3: f32[1, T, 12] = aten.cat([v0, v2], 2)
        v4: f32[1, T, 12] = aten.mul.Tensor(v3, 2)
        v5: f32[1, T, 11] = aten.linear(v4, head.weight)
        return v5
    """,
    )


def test_parts_in_any_order_broadcast_and_cast() -> None:
    program, state = start("fill_buffers", Backwards(), out_width=12)
    check_pass(program, FillBuffers(), state, matches=1)


class Gap(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros_like(x) if positions is None else torch.empty_like(x)
        buffer[..., :3].copy_(x[..., :3])
        buffer[..., 4:].copy_(x[..., 4:])
        return buffer[..., :3].sum(-1, keepdim=True) + x


class Short(nn.Module):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty_like(x)
        buffer[..., :3].copy_(x[..., :3])
        return buffer[..., :3].sum(-1, keepdim=True) + x


@pytest.mark.parametrize(("body", "reason"), [(Gap(), "overlap or leave a gap"), (Short(), "only 3 of 8")])
def test_what_is_not_filled_is_left(body: nn.Module, reason: str) -> None:
    program, state = start("fill_buffers", body)
    check_pass(program, FillBuffers(), state, matches=0, refusals=[reason])
