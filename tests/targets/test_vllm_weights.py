"""The stream of a checkpoint: every piece arrives where it belongs, and what does not fit is listed at once."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch

from fxbackend.errors import WeightError
from fxbackend.targets.vllm.weights import Loader, Receiver
from fxbackend.weights import Piece, Slot, WeightPlan

STATE = {
    "q": torch.arange(8.0).view(4, 2),
    "k": torch.arange(4.0).view(2, 2) + 50,
    "conv": torch.arange(6.0).view(2, 3),
    "packed": torch.arange(12.0).view(6, 2) + 100,
    "embed": torch.arange(10.0).view(5, 2) + 200,
}


class Target:
    """Records what a slot is loaded with."""

    def __init__(self) -> None:
        self.got: list[tuple[int | None, list[float]]] = []

    def __call__(self, value: torch.Tensor, section: int | None) -> None:
        self.got.append((section, value.flatten().tolist()))


def plan() -> WeightPlan:
    made = WeightPlan(aliases={"head": "embed"}, ignored={"old": "nothing reads it"})
    for slot in (
        Slot("qk", (6, 2), torch.float32, (Piece("q"), Piece("k")), (4, 2)),
        Slot("conv", (3, 2), torch.float32, (Piece("conv", transpose=True),), (3,)),
        Slot("gate_up", (4, 2), torch.float32, (Piece("packed", (0, 0, 2)), Piece("packed", (0, 4, 2))), (2, 2)),
        Slot("embed", (5, 2), torch.float32, (Piece("embed"),), (5,)),
    ):
        made.add(slot)
    return made


def load(
    receivers: dict[str, list[Receiver]],
    state: dict[str, torch.Tensor] | None = None,
    names: dict[str, str | None] | None = None,
) -> None:
    Loader(plan(), receivers, names or {}).load((STATE if state is None else state).items())


def test_pieces_go_to_their_sections_as_they_arrive() -> None:
    target = Target()
    load({"qk": [Receiver(target, (4, 2))]}, {name: STATE[name] for name in ("k", "conv", "packed", "q", "embed")})
    assert target.got == [(1, STATE["k"].flatten().tolist()), (0, STATE["q"].flatten().tolist())]


def test_narrowed_and_transposed_pieces() -> None:
    conv, gate_up = Target(), Target()
    load({"conv": [Receiver(conv, (3,))], "gate_up": [Receiver(gate_up, (2, 2))]})
    assert conv.got == [(None, STATE["conv"].t().flatten().tolist())]
    assert gate_up.got == [(0, STATE["packed"][:2].flatten().tolist()), (1, STATE["packed"][4:].flatten().tolist())]


def test_a_receiver_of_whole_slots_gets_them_assembled() -> None:
    target = Target()
    load({"qk": [Receiver(target)]})
    assert target.got == [(None, torch.cat([STATE["q"], STATE["k"]]).flatten().tolist())]


def test_other_sections_than_the_pieces_are_cut_from_the_whole() -> None:
    target = Target()
    load({"qk": [Receiver(target, (3, 3))]})
    whole = torch.cat([STATE["q"], STATE["k"]])
    assert target.got == [(0, whole[:3].flatten().tolist()), (1, whole[3:].flatten().tolist())]


def test_every_receiver_of_a_slot_is_filled() -> None:
    targets = Target(), Target()
    load({"embed": [Receiver(target, (5,)) for target in targets]})
    assert targets[0].got == targets[1].got == [(None, STATE["embed"].flatten().tolist())]


def test_a_tied_tensor_may_come_under_either_name_or_both() -> None:
    rest = {name: value for name, value in STATE.items() if name != "embed"}
    for tied in (
        {"head": STATE["embed"]},
        {"embed": STATE["embed"], "head": STATE["embed"]},
        {"head": STATE["embed"], "embed": STATE["embed"]},
    ):
        target = Target()
        load({"embed": [Receiver(target, (5,))]}, rest | tied)
        assert target.got[-1] == (None, STATE["embed"].flatten().tolist())


def test_names_of_the_checkpoint_are_translated_and_skipped() -> None:
    target = Target()
    state = {f"model.{name}": value for name, value in STATE.items()} | {"inv_freq": torch.ones(1)}
    names: dict[str, str | None] = {f"model.{name}": name for name in STATE}
    load({"embed": [Receiver(target, (5,))]}, state, names | {"inv_freq": None})
    assert len(target.got) == 1


def test_missing_and_unexpected_are_one_message_even_of_slots_of_other_stages() -> None:
    state = {name: value for name, value in STATE.items() if name not in ("q", "conv")}
    with pytest.raises(WeightError, match=r"Missing: conv, q\. Unexpected: also, more\."):
        load({}, state | {"more": torch.ones(1), "also": torch.ones(1), "old": torch.ones(1)})


@pytest.mark.parametrize(
    ("name", "wrong"), [("q", torch.ones(3, 2)), ("embed", torch.ones(5, 3)), ("packed", torch.ones(3, 2))]
)
def test_a_tensor_of_another_shape_is_named(name: str, wrong: torch.Tensor) -> None:
    everything = {slot.name: [Receiver(Target(), slot.sections)] for slot in plan()}
    with pytest.raises(WeightError, match=f"checkpoint tensor '{name}' is .* does not fit"):
        load(everything, STATE | {name: wrong})
