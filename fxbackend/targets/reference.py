"""The reference target: the program itself, node by node, by the plain torch bodies of the dialect. The oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from fxbackend.errors import LoweringError
from fxbackend.ops import sequences
from fxbackend.program import Program


class ReferenceModel:
    """A program with weights, callable on sequences that lie one behind the other in a flat row.

    A weight is read when a node needs it and let go after its last use: a slot that is one tensor of the model in
    hand is that tensor, and only one stacked slot at a time is a copy. It runs on the CPU.
    """

    def __init__(self, program: Program, weights: Mapping[str, torch.Tensor]):
        """Args:
            program: of one rank, before it is lowered to another target.
            weights: a whole state dict, under the names of the checkpoint.

        Raises:
            WeightError: a tensor is missing or unexpected; all of them are listed.
        """
        if program.facts.world_size > 1:
            raise LoweringError(
                f"the program is that of one of {program.facts.world_size} ranks; the reference target "
                "runs whole programs."
            )
        self.program = program
        self.weights = SlotValues(program, weights)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Logits `[T, V]`.

        Args:
            input_ids: `[T]`.
            positions: `[T]`, of each token in its own sequence.
            lengths: of the sequences; they sum to T.
        """
        batched = self.program.inputs()["input_ids"].meta["val"].ndim == 2  # as captured, before any pass
        inputs = {"input_ids": input_ids, "positions": positions}
        if batched:
            inputs = {name: value.unsqueeze(0) for name, value in inputs.items()}
        with sequences(tuple(lengths)):
            logits = self.program.run(inputs, self.weights)
        return logits[0] if logits.ndim == 3 else logits


class SlotValues(Mapping[str, torch.Tensor]):
    """The value of every weight slot, made from the checkpoint's tensors whenever it is asked for."""

    def __init__(self, program: Program, state: Mapping[str, torch.Tensor]):
        self.plan = program.weights
        self.plan.check(state)
        self.state = state
        self.names = {self.plan.aliases.get(name, name): name for name in state}

    def __getitem__(self, name: str) -> torch.Tensor:
        slot = self.plan.slots[name]
        sources = {piece.source: self.state[self.names[piece.source]].detach().cpu() for piece in slot.pieces}
        return self.plan.value(slot, sources)

    def __iter__(self) -> Iterator[str]:
        return iter(self.plan.slots)

    def __len__(self) -> int:
        return len(self.plan.slots)
