"""Gated units: three activations, gate and up in either order, packed in either order, and their lookalikes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbackend.passes.fuse_glu import FuseGlu
from fxbackend.testing import check_pass
from tests.small import start

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Mlp(nn.Module):
    """Llama's; subclasses change a step."""

    def __init__(self, activation: str = "silu", gate_bias: bool = False, up_bias: bool = False):
        super().__init__()
        self.act = ACTIVATIONS[activation]
        self.gate_proj, self.up_proj = nn.Linear(8, 6, gate_bias), nn.Linear(8, 6, up_bias)
        self.down_proj = nn.Linear(6, 8, False)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gated(x))


class UpFirst(Mlp):
    """The product the other way round."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.up_proj(x) * self.act(self.gate_proj(x))


class Packed(Mlp):
    """Phi-3: one linear, gate first."""

    def __init__(self, activation: str = "silu", bias: bool = False):
        super().__init__(activation)
        del self.gate_proj, self.up_proj
        self.gate_up = nn.Linear(8, 12, bias)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return up * self.act(gate)


class PackedUpFirst(Packed):
    """One linear, gate second."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up(x).chunk(2, -1)
        return up * self.act(gate)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", [Mlp, UpFirst, Packed, PackedUpFirst])
def test_forms(form: type[Mlp], activation: str) -> None:
    program, state = start("fuse_glu", form(activation))
    after = check_pass(program, FuseGlu(), state, matches=1)
    (node,) = after.calls(torch.ops.fxbackend.glu.default)
    assert node.args[1] == activation


def test_golden() -> None:
    program, state = start("fuse_glu", Mlp("silu", True, True))
    check_pass(
        program,
        FuseGlu(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: f32[T, 8] = fxbackend.embedding(input_ids, embed.weight)
        v1: f32[T, 12] = fxbackend.linear(v0, body.gate_up_proj.weight, body.gate_up_proj.bias)
        v2: f32[T, 6] = fxbackend.glu(v1, 'silu')
        v3: f32[T, 8] = fxbackend.linear(v2, body.down_proj.weight, None)
        v4: f32[T, 11] = fxbackend.lm_head(v3, head.weight, None)
        return v4
    """,
    )


def test_the_recipe_of_a_packed_slot_is_gate_then_up() -> None:
    program, state = start("fuse_glu", PackedUpFirst(bias=True))
    after = check_pass(program, FuseGlu(), state, matches=1)
    for name in ("body.gate_up.weight", "body.gate_up.bias"):
        slot = after.weights.slots[name]
        assert [str(piece) for piece in slot.pieces] == [f"{name}[6:12]", f"{name}[0:6]"]
        assert slot.sections == (6, 6)


class OtherInput(Mlp):
    """Lookalike: gate and up are projections of different values."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate_proj(x)) * self.up_proj(x + 1)


class Activated(Mlp):
    """Lookalike: both sides go through the activation."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.gate_proj(x)) * self.act(self.up_proj(x))


class OtherActivation(Mlp):
    """Lookalike: an activation that the op does not have."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.gate_proj(x)) * self.up_proj(x)


class Shown(Mlp):
    """Lookalike: the activated gate is read elsewhere as well."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act(self.gate_proj(x))
        return gate * self.up_proj(x) + gate


class PackedTwice(Packed):
    """Lookalike: three parts, of which two are used."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.gate_up(x)
        return self.act(packed[..., :6]) * packed[..., 6:] + packed.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "form", [OtherInput, Activated, OtherActivation, Shown, PackedTwice], ids=lambda each: each.__name__
)
def test_lookalikes_are_left(form: type[Mlp]) -> None:
    program, state = start("fuse_glu", form())
    check_pass(program, FuseGlu(), state, matches=0)


def test_refuses_a_bias_on_one_side() -> None:
    program, state = start("fuse_glu", Mlp("silu", True, False))
    check_pass(program, FuseGlu(), state, matches=0, refusals=["one of gate and up has a bias"])


def test_refuses_a_weight_that_is_read_elsewhere() -> None:
    class Reused(Mlp):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super().forward(x, positions) + self.gate_proj(x + 1).sum(-1, keepdim=True)

    program, state = start("fuse_glu", Reused())
    check_pass(program, FuseGlu(), state, matches=0, refusals=["not a weight that only this place reads"])


def test_refuses_parts_that_are_not_halves() -> None:
    class Uneven(Packed):
        def gated(self, x: torch.Tensor) -> torch.Tensor:
            packed = self.gate_up(x)
            return self.act(packed[..., :5]) * packed[..., 5:10]

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return torch.cat((self.gated(x), x[..., :3]), -1)

    program, state = start("fuse_glu", Uneven())
    check_pass(program, FuseGlu(), state, matches=0, refusals=["not the halves of a linear"])
