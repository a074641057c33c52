"""Checkpoints with a tensor per expert: which of them fill a packed slot, by Transformers' own conversions.

Transformers packs the experts of a layer while it loads them, with a `WeightConverter` that stacks the tensors of each
of its patterns over the experts, and then joins gate and up along dimension 1. A slot is filled by the same tensors
without that second copy: gate of expert 0, up of expert 0, gate of expert 1, and so on, on top of each other.
"""

from __future__ import annotations

import re

from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from fxbackend.errors import WeightError
from fxbackend.weights import Piece, WeightPlan

_Key = list[int | str]


class ExpertTensors:
    """Names of tensors per expert, collected one by one, by the slot that they fill."""

    def __init__(self) -> None:
        self._patterns: dict[str, list[str]] = {}  # slot -> the converter's patterns, in order
        self._names: dict[tuple[str, str], list[str]] = {}  # slot and pattern -> names

    def add(self, name: str, slot: str, pattern: str, converter: WeightConverter) -> bool:
        """Takes a tensor that `pattern` of `converter` puts into `slot`; False for conversions of another kind."""
        kinds = [
            (type(each), each.dim) if isinstance(each, (MergeModulelist, Concatenate)) else None
            for each in converter.operations
        ]
        joined = [(MergeModulelist, 0), (Concatenate, 1)]
        if len(converter.target_patterns) != 1 or kinds not in (joined, joined[:1]):
            return False
        self._patterns[slot] = list(converter.source_patterns)
        self._names.setdefault((slot, pattern), []).append(name)
        return True

    def fill(self, plan: WeightPlan) -> None:
        """Makes the recipes of the collected slots.

        Raises:
            WeightError: a layer has tensors for some of its experts only, or a slot that is no packed one.
        """
        for name, patterns in self._patterns.items():
            slot = plan.slots.get(name)
            if slot is None or len(slot.shape) != 3:
                raise WeightError(
                    f"the checkpoint holds a tensor per expert for {name!r}, which the model has not as "
                    "one packed tensor: check that config.json and the weight files belong together."
                )
            count, rows = slot.shape[0], slot.shape[1] // len(patterns)
            columns = [sorted(self._names.get((name, pattern), ()), key=_natural) for pattern in patterns]
            for pattern, column in zip(patterns, columns, strict=True):
                if len(column) != count:
                    raise WeightError(
                        f"the checkpoint holds {len(column)} tensors {pattern!r} for {name!r}, which has "
                        f"{count} experts: check that config.json and the weight files belong together."
                    )
            pieces = tuple(Piece(source) for expert in zip(*columns, strict=True) for source in expert)
            plan.replace(name, pieces=pieces, sections=(rows,) * len(pieces), folded=True)


def _natural(name: str) -> _Key:
    """Expert 10 comes after expert 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
