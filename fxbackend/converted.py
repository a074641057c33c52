"""A converted model: the program, what the conversion did, and ways to run and to save it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from fxbackend import saved
from fxbackend.errors import InputError
from fxbackend.program import Facts, Program
from fxbackend.report import Report
from fxbackend.targets.reference import ReferenceModel

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Rows:
    """A batch of token rows as one flat row.

    Attributes:
        ids: `[N]`, the real tokens of all rows.
        positions: `[N]`.
        lengths: of the sequences; they sum to N.
        index: `[N]`, where each token stands in the flattened batch.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    index: torch.Tensor


@dataclass(frozen=True)
class Converted:
    """What `fxbackend.convert` returns.

    Attributes:
        program: graph, weight plan, facts, stage and history.
        report: what every pass did; printable, and data.
        config: of the model it comes from, as JSON data.
        state: the weights by checkpoint name, those of the model in hand itself; None for a config without weights.
        directory: where the model's tokenizer files lie, if it was read from a directory.
        generation: the generation config of the model in hand, as JSON data.
    """

    program: Program
    report: Report
    config: Mapping[str, object] = field(repr=False)
    state: Mapping[str, torch.Tensor] | None = field(repr=False, default=None)
    directory: Path | None = None
    generation: Mapping[str, object] | None = field(repr=False, default=None)

    @property
    def graph(self) -> fx.Graph:
        """The rewritten graph."""
        return self.program.graph

    @cached_property
    def _model(self) -> ReferenceModel:
        return ReferenceModel(self.program, self._weights("called"))

    def __call__(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The logits `[B, T, V]` of Hugging Face, by the reference target on the CPU.

        Args:
            input_ids: `[B, T]`, or `[T]` for one row.
            position_ids: of the same shape, or one row for all; by default 0, 1, ... over the real tokens of each row.
                Without a mask, a place where they do not go up by one begins a new sequence, as in Transformers.
            attention_mask: `[B, T]` of 0 and 1; the padding may be left or right of the tokens. Padding is not
                computed: its logits are zeros.

        Raises:
            InputError: shapes, ids, positions or the mask cannot be what was meant, or a row is too long.
        """
        ids = _batch("input_ids", input_ids, None)
        rows = flatten(ids, position_ids, attention_mask, self.program.facts)
        logits = self._model(rows.ids, rows.positions, rows.lengths)
        if len(rows.index) == ids.numel():
            return logits.view(*ids.shape, -1)
        padded = logits.new_zeros(ids.numel(), logits.shape[-1])
        padded[rows.index] = logits
        return padded.view(*ids.shape, -1)

    def save(self, directory: str | Path) -> None:
        """Writes a directory that vLLM serves and `fxbackend.convert` reads: config, program, weights, tokenizer files.

        Raises:
            InputError: the directory is not empty, or there are no weights to write.
        """
        saved.write(Path(directory), self.program, self.config, self._weights("saved"), self.directory, self.generation)

    def to_vllm(self, **engine_args: object) -> LLM:
        """A `vllm.LLM` that runs this program with these weights.

        Args:
            engine_args: of `vllm.LLM`, such as `max_model_len` or `tensor_parallel_size`. A model that was in hand has
                no tokenizer with it: name one by `tokenizer`, or give and take token ids.

        Raises:
            InputError: vLLM is not installed, or there are no weights.
        """
        try:
            from fxbackend.targets.vllm.launch import launch
        except ModuleNotFoundError as error:
            if error.name != "vllm":
                raise
            raise InputError("to_vllm() needs vLLM: install it, or call the converted model itself.") from error
        directory = tempfile.mkdtemp(prefix="fxbackend_")
        try:
            self.save(directory)
            llm = launch(directory, **self._engine_arguments(Path(directory), engine_args))
        except BaseException:
            shutil.rmtree(directory)
            raise
        weakref.finalize(llm, shutil.rmtree, directory, ignore_errors=True)  # the engine may load its weights again
        return llm

    def _engine_arguments(self, directory: Path, given: Mapping[str, object]) -> dict[str, object]:
        """What the engine would guess otherwise: by itself it turns float32 into a narrower dtype."""
        facts = self.program.facts
        chosen: dict[str, object] = {
            "dtype": str(facts.dtype).removeprefix("torch."),
            "max_model_len": facts.max_model_len,
        }
        if "tokenizer" not in given and not saved.has_tokenizer(directory):
            chosen["skip_tokenizer_init"] = True
        return {**chosen, **given}

    def _weights(self, done: str) -> Mapping[str, torch.Tensor]:
        if self.state is None:
            raise InputError(
                f"this {self.program.facts.architecture} was converted from a config without weights and "
                f"cannot be {done}: convert a loaded model, or a directory that holds its weights."
            )
        return self.state


def flatten(
    input_ids: torch.Tensor, position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, facts: Facts
) -> Rows:
    """Lays the real tokens of a batch `[B, T]` one behind the other.

    Raises:
        InputError: see `Converted.__call__`.
    """
    ids = input_ids.cpu()
    mask = torch.ones_like(ids) if attention_mask is None else _mask(attention_mask, ids)
    positions = mask.cumsum(1) - 1 if position_ids is None else _batch("position_ids", position_ids, ids).cpu()
    real = mask.flatten().bool()
    lengths = [int(count) for count in mask.sum(1)]
    if position_ids is not None and attention_mask is None:
        lengths = _packed(positions)
    if max(lengths) > facts.max_model_len:
        raise InputError(
            f"a row of {max(lengths)} tokens is longer than max_model_len={facts.max_model_len}: shorten "
            "it, or convert with a larger max_model_len."
        )
    rows = Rows(ids.flatten()[real], positions.flatten()[real], tuple(lengths), real.nonzero().flatten())
    _in_range("position_ids", rows.positions, facts.max_model_len, "max_model_len")
    _in_range("input_ids", rows.ids, facts.vocab_size, "the vocabulary")
    return rows


def _batch(name: str, value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """An integer tensor as `[B, T]`."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{name} is a {kind}: give a tensor of integers.")
    rows = value.unsqueeze(0) if value.ndim == 1 else value
    if rows.ndim != 2 or rows.numel() == 0:
        raise InputError(f"{name} has the shape {list(value.shape)}: give [batch, tokens] or [tokens], with tokens.")
    if like is not None:
        if rows.shape not in (like.shape, (1, like.shape[1])):
            raise InputError(
                f"{name} has the shape {list(value.shape)}, and input_ids {list(like.shape)}: give one per token."
            )
        rows = rows.expand(like.shape)
    return rows.long()


def _mask(attention_mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim > 2:
        raise InputError(
            f"attention_mask has the shape {list(attention_mask.shape)}: a mask of pairs of tokens cannot "
            "be unpadded; give the padding mask [batch, tokens]."
        )
    if isinstance(attention_mask, torch.Tensor) and attention_mask.is_floating_point():
        whole = attention_mask.long()
        attention_mask = whole if bool((attention_mask == whole).all()) else attention_mask
    mask = _batch("attention_mask", attention_mask, ids).cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("attention_mask holds values other than 0 (padding) and 1 (token).")
    if not bool(mask.any(1).all()):
        raise InputError("attention_mask hides every token of a row: leave that row out.")
    end = mask.new_zeros(len(mask), 1)
    borders = torch.diff(mask, dim=1, prepend=end, append=end).abs().sum(1)
    if bool((borders > 2).any()):
        row = int((borders > 2).nonzero()[0])
        raise InputError(
            f"attention_mask has a hole in row {row}: the tokens of a row must be contiguous, with the "
            "padding left or right of them."
        )
    return mask


def _packed(positions: torch.Tensor) -> list[int]:
    """Lengths of the sequences, which begin where positions do not go up by one."""
    lengths: list[int] = []
    for row in positions:
        starts = [0, *(int(at) + 1 for at in (row.diff() != 1).nonzero()), len(row)]
        lengths += [end - start for start, end in pairwise(starts)]
    return lengths


def _in_range(name: str, value: torch.Tensor, limit: int, what: str) -> None:
    wrong = (value < 0) | (value >= limit)
    if bool(wrong.any()):
        raise InputError(f"{name} holds {int(value[wrong][0])}, outside of {what} (0 to {limit - 1}).")
