"""The weight plan: recipes of slots, splits over ranks, and one message for all that does not fit."""

from __future__ import annotations

import pytest
import torch

from fxbackend.errors import WeightError
from fxbackend.weights import Piece, Shard, Slot, WeightPlan

F32 = torch.float32


def slot(name: str, *shape: int, **more: object) -> Slot:
    return Slot(name, shape, F32, (Piece(name),), shape[:1], **more)  # type: ignore[arg-type]


@pytest.fixture
def plan() -> WeightPlan:
    plan = WeightPlan()
    for each in (slot("q", 4, 3), slot("k", 2, 3), slot("v", 2, 3), slot("embed", 5, 3)):
        plan.add(each)
    plan.aliases["head"] = "embed"
    plan.ignored["inv_freq"] = "a buffer"
    return plan


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    shapes = {"q": (4, 3), "k": (2, 3), "v": (2, 3), "embed": (5, 3)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_pieces_are_narrowed_and_transposed() -> None:
    source = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(Piece("w").apply(source), source)
    assert torch.equal(Piece("w", (0, 1, 2)).apply(source), source[1:])
    assert torch.equal(Piece("w", (1, 1, 2), transpose=True).apply(source), source[:, 1:3].t())
    assert [str(Piece("w", (1, 1, 2), True)), str(Piece("w", (0, 0, 2)))] == ["w[:, 1:3].T", "w[0:2]"]


def test_a_stacked_slot_holds_its_parts_in_order(plan: WeightPlan, state: dict[str, torch.Tensor]) -> None:
    stacked = plan.stacked("qkv", ["q", "k", "v"])
    plan.add(stacked)
    assert stacked.shape == (8, 3) and stacked.sections == (4, 2, 2)
    values = plan.materialise(state)
    assert torch.equal(values["qkv"], torch.cat([state["q"], state["k"], state["v"]]))


def test_an_unstacked_slot_is_a_view_of_the_checkpoint(plan: WeightPlan, state: dict[str, torch.Tensor]) -> None:
    assert plan.materialise(state)["q"].data_ptr() == state["q"].data_ptr()


@pytest.mark.parametrize("names", [["q", "wide"], ["q", "half"], ["q", "split"]])
def test_what_cannot_be_stacked(plan: WeightPlan, names: list[str]) -> None:
    plan.add(slot("wide", 2, 4))
    plan.add(Slot("half", (2, 3), torch.bfloat16, (Piece("half"),), (2,)))
    plan.add(slot("split", 2, 3, shard=Shard(0, (2,), (1,))))
    with pytest.raises(WeightError, match="cannot stack"):
        plan.stacked("all", names)


def test_a_name_is_taken_once(plan: WeightPlan) -> None:
    plan.add(slot("q", 4, 3))  # the same recipe again is no conflict
    with pytest.raises(WeightError, match="'q' exists already with another recipe"):
        plan.add(slot("q", 4, 4))


def test_one_message_lists_all_that_is_missing_and_unexpected(plan: WeightPlan) -> None:
    with pytest.raises(WeightError) as error:
        plan.check(["q", "head", "inv_freq", "extra", "more"])
    assert "Missing: k, v. Unexpected: extra, more." in str(error.value)
    plan.check(["q", "k", "v", "embed"])
    plan.check(["q", "k", "v", "head", "inv_freq"])  # the tied tensor under its other name


def test_a_checkpoint_tensor_of_another_shape(plan: WeightPlan, state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(WeightError, match=r"'q' is \(4, 3\), the checkpoint gives \(3, 4\)"):
        plan.materialise({**state, "q": state["q"].t()})


def test_where_a_checkpoint_tensor_goes(plan: WeightPlan) -> None:
    plan.add(plan.stacked("qkv", ["q", "k", "v"]))
    assert [(each.name, index) for each, index in plan.pieces_of("k")] == [("k", 0), ("qkv", 1)]
    assert [each.name for each, _index in plan.pieces_of("head")] == ["embed"]


def test_constants_are_filled_by_no_checkpoint(plan: WeightPlan, state: dict[str, torch.Tensor]) -> None:
    table = torch.randn(7, 2)
    plan.add_constant("table", table)
    assert plan.materialise(state)["table"] is table
    plan.drop("table")
    assert "table" not in plan.slots and "table" not in plan.constants


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_hold_a_stacked_slot(world: int) -> None:
    shard = Shard(0, (8, 4, 4), (1, 1, 1))
    whole = torch.arange(16.0)[:, None].expand(16, 3)
    parts = [shard.take(whole, rank, world) for rank in range(world)]
    assert all(tuple(part.shape) == shard.local((16, 3), world) for part in parts)
    q, k = 8 // world, 4 // world
    assert torch.equal(torch.cat([part[:q] for part in parts]), whole[:8])
    assert torch.equal(torch.cat([part[q : q + k] for part in parts]), whole[8:12])


def test_ranks_share_heads_that_are_fewer_than_they() -> None:
    shard = Shard(0, (8, 2), (1, 2))  # 8 rows of q over 4 ranks, 2 rows of k on two ranks each
    whole = torch.arange(10.0)
    assert [shard.take(whole, rank, 4).tolist() for rank in range(4)] == [[0, 1, 8], [2, 3, 8], [4, 5, 9], [6, 7, 9]]
    assert shard.local((10,), 4) == (3,)


def test_a_copy_is_independent(plan: WeightPlan) -> None:
    copied = plan.copy()
    copied.drop("q")
    copied.ignored["more"] = "why not"
    assert "q" in plan.slots and "more" not in plan.ignored


def test_text(plan: WeightPlan) -> None:
    plan.add(plan.stacked("kv", ["k", "v"]))
    plan.replace("kv", shard=Shard(0, (2, 2), (1, 1)))
    assert str(plan).splitlines()[-2:] == [
        "kv  [4, 3] float32  <- k ++ v  split dim 0 (2, 2)",
        "ignored inv_freq: a buffer",
    ]
