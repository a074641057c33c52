"""Rotary embedding: halves and neighbours, whole and partial, in the dtype of the model; and its lookalikes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.rope import Rope
from fxbackend.testing import check_pass
from tests.small import Angles, rotate_half, rotate_neighbours, start


class Rotation(nn.Module):
    """Two heads of eight, rotated; subclasses change a step."""

    def __init__(self, rotated: int = 8, interleaved: bool = False):
        super().__init__()
        self.rotated, self.interleaved = rotated, interleaved
        self.angles = Angles(rotated, interleaved)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_neighbours(x) if self.interleaved else rotate_half(x)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., : self.rotated], x[..., self.rotated :]
        return torch.cat((part * cos + self.turn(part) * sin, rest), -1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x, positions)
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        return self.rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1)).transpose(1, 2).reshape(x.shape)


class TokensFirst(Rotation):
    """Heads behind the tokens already (Phi-MoE, remote code)."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x, positions)
        return self.rotate(x.view(*x.shape[:2], 2, 8), cos.unsqueeze(2), sin.unsqueeze(2)).reshape(x.shape)


class InFloat32(Rotation):
    """Cohere: the values are cast, the tables are the model's."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate(x.float(), cos, sin).to(x.dtype)


class WideTables(Rotation):
    """Olmo2: the tables are float32, and the values meet them in it."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x.float(), positions)
        heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
        return self.rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1)).to(x.dtype).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("form", [Rotation, TokensFirst])
def test_forms(form: type[Rotation], rotated: int, interleaved: bool, dtype: torch.dtype) -> None:
    program, state = start("rope", form(rotated, interleaved), 16, dtype=dtype)
    after = check_pass(program, Rope(), state, matches=1, tolerance=1e-6)
    (node,) = after.calls(torch.ops.fxbackend.rope.default)
    assert node.args[3] is interleaved
    table = after.weights.constants[node.args[2].target]
    assert table.shape == (program.facts.max_model_len, rotated) and table.dtype == dtype


@pytest.mark.parametrize("form", [InFloat32, WideTables])
def test_sums_in_float32_stay_in_float32(form: type[Rotation]) -> None:
    program, state = start("rope", form(8), 16, dtype=torch.bfloat16)
    after = check_pass(program, Rope(), state, matches=1, tolerance=0.0)
    (node,) = after.calls(torch.ops.fxbackend.rope.default)
    assert node.args[0].meta["val"].dtype == torch.bfloat16
    assert after.weights.constants[node.args[2].target].dtype == torch.float32


def test_golden() -> None:
    program, state = start("rope", Rotation(4), 16)
    check_pass(
        program,
        Rope(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 16] = aten.embedding(embed.weight, input_ids)
        v2: f32[T, 2, 8] = aten.reshape(v1, [v0, 2, 8])
        v3: f32[2, T, 8] = aten.transpose.int(v2, 0, 1)
        v4: f32[T, 2, 8] = aten.transpose.int(v3, 0, 1)
        v5: f32[T, 2, 8] = fxbackend.rope(v4, positions, rope_table_0_1, False)
        v6: f32[2, T, 8] = aten.transpose.int(v5, 0, 1)
        v7: f32[T, 2, 8] = aten.transpose.int(v6, 0, 1)
        v8: f32[T, 16] = aten.reshape(v7, [v0, 16])
        v9: f32[T, 11] = aten.linear(v8, head.weight)
        return v9
    """,
    )


def test_all_layers_share_one_table() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Rotation(), Rotation()

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, positions), positions)

    program, state = start("rope", Layers(), 16)
    after = check_pass(program, Rope(), state, matches=2)
    first, second = after.calls(torch.ops.fxbackend.rope.default)
    tables = [after.weights.constants[node.args[2].target] for node in (first, second)]
    assert torch.equal(*tables)


class Backwards(Rotation):
    """Lookalike: turns the other way, (x2, -x1)."""

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x[..., 4:], -x[..., :4]), -1)


class Swapped(Rotation):
    """Lookalike: multiplies another value than it turns."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * cos + self.turn(x + 1) * sin


class Unequal(Rotation):
    """Lookalike: the parts that are swapped are not halves."""

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., 6:], x[..., :6]), -1)


class Shown(Rotation):
    """Lookalike: the turned value is read elsewhere as well."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = self.turn(x)
        return x * cos + turned * sin + turned


@pytest.mark.parametrize("form", [Backwards, Swapped, Shown], ids=lambda each: each.__name__)
def test_lookalikes_are_left(form: type[Rotation]) -> None:
    program, state = start("rope", form(8), 16)
    check_pass(program, Rope(), state, matches=0)


class Factor(Angles):
    """Angles whose second half is scaled by a buffer."""

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("factor", torch.arange(1.0, width + 1))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().forward(x, positions)
        return cos * self.factor, sin


def test_refuses_tables_whose_halves_differ() -> None:
    body = Rotation(8)
    body.angles = Factor(8)
    program, state = start("rope", body, 16)
    check_pass(program, Rope(), state, matches=0, refusals=["does not hold each angle twice"])


def test_refuses_interleaved_rotation_with_tables_by_halves() -> None:
    body = Rotation(8, interleaved=True)
    body.angles = Angles(8, interleaved=False)
    program, state = start("rope", body, 16)
    check_pass(program, Rope(), state, matches=0, refusals=["does not hold each angle twice"])


def test_refuses_trained_tables() -> None:
    class Trained(Rotation):
        def __init__(self) -> None:
            super().__init__()
            self.cos, self.sin = nn.Embedding(32, 8), nn.Embedding(32, 8)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
            cos, sin = self.cos(positions).unsqueeze(1), self.sin(positions).unsqueeze(1)
            return self.rotate(heads, cos, sin).transpose(1, 2).reshape(x.shape)

    program, state = start("rope", Trained(), 16)
    check_pass(program, Rope(), state, matches=0, refusals=["is a trained weight"])


def test_refuses_parts_that_are_not_halves() -> None:
    program, state = start("rope", Unequal(8), 16)
    check_pass(program, Rope(), state, matches=0, refusals=["not halves of the tables"])


def test_refuses_a_rest_with_a_gap() -> None:
    class Gap(Rotation):
        def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            part, rest = x[..., :4], x[..., 4:6]
            return torch.cat((part * cos + self.turn(part) * sin, rest), -1)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = self.angles(x, positions)
            heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
            out = self.rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1))
            return torch.cat((out, out[..., :2]), -1).transpose(1, 2).reshape(x.shape)

    program, state = start("rope", Gap(4), 16)
    # The rotation of the part is one; the cat behind it is not its rest.
    check_pass(program, Rope(), state, matches=1, refusals=["does not follow the rotated one"])


def test_refuses_values_without_heads() -> None:
    class Flat(Rotation):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = (each.unsqueeze(1) for each in self.angles(x, positions))
            heads = x.view(*x.shape[:2], 2, 2, 4).permute(0, 2, 3, 1, 4)
            return self.rotate(heads, cos, sin).permute(0, 3, 1, 2, 4).reshape(x.shape)

    program, state = start("rope", Flat(4), 16)
    check_pass(program, Rope(), state, matches=0, refusals=["not [heads, tokens, width]"])


def test_refuses_another_dtype() -> None:
    class Wide(WideTables):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = self.angles(x.float(), positions)
            heads = x.view(*x.shape[:2], 2, 8).transpose(1, 2)
            rotated = heads * cos.unsqueeze(1) + self.turn(heads) * sin.unsqueeze(1)
            return rotated.cumsum(-1).to(x.dtype).transpose(1, 2).reshape(x.shape)

    program, state = start("rope", Wide(8), 16, dtype=torch.bfloat16)
    check_pass(program, Rope(), state, matches=0, refusals=["changes the dtype of x"])
