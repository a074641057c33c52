"""Streams a checkpoint into the adapters of a lowered program, one tensor at a time and without a second copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from fxbackend.errors import WeightError
from fxbackend.weights import Slot, WeightPlan


@dataclass(frozen=True)
class Receiver:
    """What takes the value of a weight slot on this rank.

    Attributes:
        load: called with a whole tensor (over all ranks), and with the number of the section that it fills, or None
            when it is the whole slot.
        sections: lengths along dimension 0 that `load` takes one by one; empty when it takes whole slots only.
    """

    load: Callable[[torch.Tensor, int | None], None]
    sections: tuple[int, ...] = ()


class Loader:
    """Fills the slots that this rank and pipeline stage hold."""

    def __init__(self, plan: WeightPlan, receivers: Mapping[str, list[Receiver]], names: Mapping[str, str | None]):
        """Args:
        plan: of the whole program, all stages together: every rank sees the whole checkpoint.
        receivers: by slot name, for the slots of this rank and stage.
        names: the name of the plan for a name of the checkpoint, None for one that is skipped; others stay.
        """
        self.plan, self.receivers, self.names = plan, receivers, names
        self._readers = plan.sources()
        self._waiting: dict[str, dict[int, torch.Tensor]] = {}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes all tensors of a checkpoint.

        Raises:
            WeightError: one message that lists every missing and every unexpected tensor.
        """
        given: set[str] = set()
        for checkpoint_name, tensor in weights:
            name = self.names.get(checkpoint_name, checkpoint_name)
            if name is None:
                continue
            source = self.plan.aliases.get(name, name)
            if source in given and source != name:
                continue  # a tied tensor that the checkpoint holds twice
            given.add(source)
            for slot, index in self._readers.get(source, ()):
                if slot.name in self.receivers:
                    self._piece(slot, index, tensor)
        self.plan.check(given)

    def _piece(self, slot: Slot, index: int, tensor: torch.Tensor) -> None:
        piece = slot.pieces[index]
        try:
            value = piece.apply(tensor)
        except (RuntimeError, IndexError) as error:
            raise _misfit(slot, piece.source, tensor) from error
        if len(slot.pieces) == 1:
            self._whole(slot, value)
        elif _streams(slot, self.receivers[slot.name]):
            if tuple(value.shape) != slot.piece_shape(index):
                raise _misfit(slot, piece.source, tensor)
            for receiver in self.receivers[slot.name]:
                receiver.load(value, index)
        else:
            waiting = self._waiting.setdefault(slot.name, {})
            waiting[index] = value
            if len(waiting) == len(slot.pieces):
                self._whole(slot, slot.assemble([waiting[each] for each in range(len(slot.pieces))]))
                del self._waiting[slot.name]

    def _whole(self, slot: Slot, value: torch.Tensor) -> None:
        if tuple(value.shape) != slot.shape:
            raise _misfit(slot, slot.pieces[0].source, value)
        for receiver in self.receivers[slot.name]:
            if len(receiver.sections) < 2:
                receiver.load(value, None)
                continue
            for index, part in enumerate(value.split(receiver.sections)):
                receiver.load(part, index)


def _streams(slot: Slot, receivers: Iterable[Receiver]) -> bool:
    """Whether piece i of a slot is section i of each receiver, so that none has to wait for the others."""
    return len(slot.pieces) == len(slot.sections) and all(each.sections == slot.sections for each in receivers)


def _misfit(slot: Slot, source: str, tensor: torch.Tensor) -> WeightError:
    return WeightError(
        f"the checkpoint tensor {source!r} is {tuple(tensor.shape)} and does not fit {slot.name!r} of shape "
        f"{slot.shape}: check that config.json and the weight files belong together."
    )
