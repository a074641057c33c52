"""The weight plan: how every weight slot of a program is filled from the tensors of a checkpoint.

A *slot* is what the graph reads (a `get_attr` node names it). It is the concatenation, along dimension 0, of
*pieces*; a piece is one checkpoint tensor, possibly transposed or narrowed. A fusion that stacks projections builds
the stacked slot in the same edit, so that graph and weights cannot drift apart. The slot of all experts of a layer may
be *folded*: its pieces, one per expert, are concatenated and then viewed as the slot's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fxbackend.errors import WeightError


@dataclass(frozen=True)
class Piece:
    """One checkpoint tensor, or a part of it, as it enters a slot.

    Attributes:
        source: name of the tensor in the checkpoint.
        narrow: `(dim, start, length)` taken from the source before the transpose, or None for all of it.
        transpose: whether the last two dimensions of the (narrowed) source change places (GPT-2's Conv1D).
        halves: whether rows 0, 2, 4, ... of dimension 1 then come before rows 1, 3, 5, ... (GPT-OSS lays the gate and
            the other half of an expert row by row between each other).
    """

    source: str
    narrow: tuple[int, int, int] | None = None
    transpose: bool = False
    halves: bool = False

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's value, a view of `tensor` where possible."""
        if self.narrow is not None:
            tensor = tensor.narrow(*self.narrow)
        tensor = tensor.mT if self.transpose else tensor
        return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), 1) if self.halves else tensor

    def __str__(self) -> str:
        text = self.source
        if self.narrow is not None:
            dim, start, length = self.narrow
            text += f"[{':, ' * dim}{start}:{start + length}]"
        return text + (".T" if self.transpose else "") + (".halves" if self.halves else "")


@dataclass(frozen=True)
class Shard:
    """How a slot is split over tensor-parallel ranks.

    Attributes:
        dim: the dimension of the slot that is split.
        sections: lengths along `dim` that are split one by one (q, k, v of a stacked projection); they sum to the
            whole dimension.
        replicate: per section, how many ranks share one part (KV heads fewer than ranks); 1 is a plain split.
        first: whether ranks but the first hold zeros (a bias that is added before the sum over ranks).
    """

    dim: int
    sections: tuple[int, ...]
    replicate: tuple[int, ...]
    first: bool = False

    def take(self, tensor: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """The part of a whole slot value that belongs to `rank` of `world`."""
        parts = []
        for section, copies in zip(tensor.split(self.sections, self.dim), self.replicate, strict=True):
            parts.append(section.chunk(world // copies, self.dim)[rank // copies])
        whole = torch.cat(parts, self.dim)
        return torch.zeros_like(whole) if self.first and rank else whole

    def local(self, shape: tuple[int, ...], world: int) -> tuple[int, ...]:
        """The shape of one rank's part of a slot of `shape`."""
        size = sum(section * copies // world for section, copies in zip(self.sections, self.replicate, strict=True))
        return (*shape[: self.dim], size, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class Slot:
    """A weight that the graph reads.

    Attributes:
        name: what the graph's `get_attr` nodes say.
        shape: the whole shape, over all ranks.
        dtype: the dtype in the graph.
        pieces: what fills it, in order along dimension 0; empty for a constant.
        sections: lengths along dimension 0, one per stacked projection (one entry when nothing is stacked).
        shard: the split over ranks, None when every rank holds all of it.
        parameter: False for buffers and constants.
        folded: whether the pieces, on top of each other, are then viewed as `shape`, whose first two dimensions they
            join; `sections` are lengths of the pieces then.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    sections: tuple[int, ...] = ()
    shard: Shard | None = None
    parameter: bool = True
    folded: bool = False

    def piece_shape(self, index: int) -> tuple[int, ...]:
        """The shape that piece `index` must have, where every piece is a section."""
        return (self.sections[index], *self.shape[2 if self.folded else 1 :])

    def assemble(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The value of the slot from those of its pieces; not yet its dtype."""
        value = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        whole = (self.shape[0] * self.shape[1], *self.shape[2:]) if self.folded else self.shape
        return value.reshape(self.shape) if self.folded and tuple(value.shape) == whole else value

    @property
    def bytes(self) -> int:
        """Size of the whole slot in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def local_shape(self, world: int) -> tuple[int, ...]:
        """The shape that one of `world` ranks holds."""
        return self.shape if self.shard is None else self.shard.local(self.shape, world)


@dataclass
class WeightPlan:
    """All slots of a program, the constants computed at conversion, and the checkpoint names they answer to.

    Attributes:
        slots: by name.
        constants: values of slots that no checkpoint holds (evaluated position tables, rotary frequencies).
        aliases: other checkpoint names of a source (tied parameters: `lm_head.weight` -> the embedding).
        ignored: checkpoint names that nothing reads, each with its reason.
    """

    slots: dict[str, Slot] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def copy(self) -> WeightPlan:
        """A copy that can be edited without touching this one (constant tensors are shared)."""
        return WeightPlan(dict(self.slots), dict(self.constants), dict(self.aliases), dict(self.ignored))

    def add(self, slot: Slot) -> None:
        """Adds `slot`; a name that is taken by a different slot is an error."""
        if self.slots.get(slot.name, slot) != slot:
            raise WeightError(f"weight slot {slot.name!r} exists already with another recipe.")
        self.slots[slot.name] = slot

    def add_constant(self, name: str, value: torch.Tensor) -> Slot:
        """Adds a constant slot holding `value`."""
        slot = Slot(
            name, tuple(value.shape), value.dtype, sections=(value.shape[0],) if value.ndim else (), parameter=False
        )
        self.add(slot)
        self.constants[name] = value
        return slot

    def stacked(self, name: str, names: Iterable[str]) -> Slot:
        """A new slot that holds `names` on top of each other along dimension 0 (not yet added)."""
        parts = [self.slots[each] for each in names]
        first = parts[0]
        for part in parts[1:]:
            if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype:
                raise WeightError(f"cannot stack {first.name!r} {first.shape} and {part.name!r} {part.shape}.")
        if any(part.folded for part in parts):
            raise WeightError(f"cannot stack {[p.name for p in parts]}: they are weights of experts.")
        if any(part.shard for part in parts):
            raise WeightError(f"cannot stack {[p.name for p in parts]}: they are sharded already.")
        return Slot(
            name,
            (sum(part.shape[0] for part in parts), *first.shape[1:]),
            first.dtype,
            tuple(piece for part in parts for piece in part.pieces),
            tuple(section for part in parts for section in part.sections),
        )

    def drop(self, name: str) -> None:
        """Removes a slot that the graph reads no more."""
        del self.slots[name]
        self.constants.pop(name, None)

    def replace(self, name: str, **changes: object) -> Slot:
        """Replaces fields of a slot in place and returns the new slot."""
        self.slots[name] = dataclasses.replace(self.slots[name], **changes)  # type: ignore[arg-type]
        return self.slots[name]

    def sources(self) -> dict[str, list[tuple[Slot, int]]]:
        """For every checkpoint name: the slots that read it, with the index of the piece."""
        readers: dict[str, list[tuple[Slot, int]]] = {}
        for slot in self.slots.values():
            for index, piece in enumerate(slot.pieces):
                readers.setdefault(piece.source, []).append((slot, index))
        return readers

    def check(self, names: Iterable[str]) -> None:
        """Compares the plan with the names of a checkpoint.

        Raises:
            WeightError: one message that lists every missing and every unexpected tensor.
        """
        given = {self.aliases.get(name, name) for name in names}
        wanted = set(self.sources())
        missing = sorted(wanted - given)
        unexpected = sorted(given - wanted - set(self.ignored))
        if missing or unexpected:
            raise WeightError(
                "the checkpoint does not fit the model."
                + (f" Missing: {', '.join(missing)}." if missing else "")
                + (f" Unexpected: {', '.join(unexpected)}." if unexpected else "")
                + " Check that config.json and the weight files belong together."
            )

    def pieces_of(self, name: str) -> list[tuple[Slot, int]]:
        """Where the checkpoint tensor `name` goes: slots with the index of the piece."""
        return self.sources().get(self.aliases.get(name, name), [])

    def materialise(self, state: Mapping[str, torch.Tensor], rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
        """Values of all slots for one rank, from a whole state dict (views of it wherever nothing is stacked)."""
        self.check(state)
        by_source = {self.aliases.get(name, name): tensor for name, tensor in state.items()}
        return {slot.name: self.value(slot, by_source, rank, world) for slot in self.slots.values()}

    def value(self, slot: Slot, state: Mapping[str, torch.Tensor], rank: int = 0, world: int = 1) -> torch.Tensor:
        """The value of one slot for one rank, from tensors by source name (aliases resolved)."""
        if slot.name in self.constants:
            value = self.constants[slot.name]
            return value if slot.shard is None else slot.shard.take(value, rank, world)
        parts = [piece.apply(state[piece.source]) for piece in slot.pieces]
        value = slot.assemble(parts).to(slot.dtype)
        if tuple(value.shape) != slot.shape:
            raise WeightError(
                f"weight slot {slot.name!r} is {slot.shape}, the checkpoint gives {tuple(value.shape)} "
                f"({', '.join(map(str, slot.pieces))})."
            )
        return value if slot.shard is None else slot.shard.take(value, rank, world)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots.values())

    def __str__(self) -> str:
        lines = []
        for slot in self:
            recipe = " ++ ".join(map(str, slot.pieces)) or "constant"
            split = f"  split dim {slot.shard.dim} {slot.shard.sections}" if slot.shard else ""
            split += " on the first rank" if slot.shard and slot.shard.first else ""
            lines.append(f"{slot.name}  {list(slot.shape)} {str(slot.dtype)[6:]}  <- {recipe}{split}")
        lines += [f"ignored {name}: {reason}" for name, reason in self.ignored.items()]
        return "\n".join(lines)
