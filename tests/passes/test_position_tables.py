"""What follows from positions alone becomes a table, exactly; what does not is left."""

from __future__ import annotations

import torch
from torch import nn

from fxbackend.passes.position_tables import PositionTables
from fxbackend.testing import check_pass
from tests.small import Angles, start

aten = torch.ops.aten


class Adds(nn.Module):
    """Adds cos and sin of the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = Angles(8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles(x, positions)
        return x + cos * x + sin


def test_golden() -> None:
    program, state = start("position_tables", Adds())
    after = check_pass(
        program,
        PositionTables(),
        state,
        matches=2,
        tolerance=0.0,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: f32[T, 8] = aten.embedding(embed.weight, input_ids)
        v1: f32[T, 8] = aten.embedding(position_table_0, positions)
        v2: f32[T, 8] = aten.embedding(position_table_1, positions)
        v3: f32[T, 8] = aten.mul.Tensor(v1, v0)
        v4: f32[T, 8] = aten.add.Tensor(v0, v3)
        v5: f32[T, 8] = aten.add.Tensor(v4, v2)
        v6: f32[T, 11] = aten.linear(v5, head.weight)
        return v6
    """,
    )
    assert "body.angles.inv_freq" not in after.weights.slots


def test_the_table_has_a_row_for_every_position_of_the_longest_sequence() -> None:
    program, state = start("position_tables", Adds())
    after = check_pass(program, PositionTables(), state, matches=2)
    angles = torch.arange(program.facts.max_model_len)[:, None] * (10.0 ** -(torch.arange(0, 8, 2) / 8))
    torch.testing.assert_close(after.weights.constants["position_table_0"], torch.cat((angles, angles), 1).cos())


def test_equal_tables_of_all_layers_are_one() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = Angles(8)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            for _layer in range(3):
                x = x + self.angles(x, positions)[0]
            return x

    program, state = start("position_tables", Layers())
    after = check_pass(program, PositionTables(), state, matches=1)
    assert list(after.weights.constants) == ["position_table_0"]


def test_an_axis_for_the_heads_stays_in_its_place() -> None:
    class Heads(Adds):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = self.angles(x, positions)
            heads = x.unsqueeze(2).expand(1, x.shape[1], 3, 8)
            behind = heads * cos.unsqueeze(2)
            before = heads.transpose(1, 2) * sin.unsqueeze(1)
            return (behind + before.transpose(1, 2)).sum(2)

    program, state = start("position_tables", Heads())
    after = check_pass(program, PositionTables(), state, matches=2)
    axes = [
        node.args[1]
        for node in after.calls(aten.unsqueeze.default)
        if node.args[0].target is aten.embedding.default and "position" in node.args[0].args[0].target
    ]
    assert sorted(axes) == [0, 1]


def test_a_trained_table_is_no_constant() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(32, 8)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + self.positions(positions)

    program, state = start("position_tables", Trained())
    check_pass(program, PositionTables(), state, matches=0)


def test_refuses_a_row_that_depends_on_other_positions() -> None:
    class Cumulative(Adds):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return x + self.angles(x, positions)[0].cumsum(1)

    program, state = start("position_tables", Cumulative())
    check_pass(program, PositionTables(), state, matches=0, refusals=["depends on more than its own position"])
