"""The report of a conversion: printable, and data."""

from __future__ import annotations

import io
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from fxbackend.printer import op_counts
from fxbackend.program import Facts, PassRecord, Program

dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        facts: of the model.
        passes: one record per pass, in order.
        ops: how often each op occurs in the result.
        weight_bytes: size of all weight slots, over all tensor-parallel ranks, each counted once.
        rank_bytes: what one rank holds of them; the vocabulary's tables, which a target splits inside, count whole.
        whole_bytes: those that every rank holds whole, the vocabulary's tables not among them.
        reductions: sums over tensor-parallel ranks in one run.
        notes: sentences worth knowing (frozen rope frequencies, replicated blocks).
    """

    facts: Facts
    passes: tuple[PassRecord, ...]
    ops: dict[str, int]
    weight_bytes: int
    rank_bytes: int
    whole_bytes: int
    reductions: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, parallel: Program | None = None) -> Report:
        """The report of a program, from its history.

        Args:
            program: at any stage.
            parallel: the program before lowering, which names the vocabulary and the reductions; by default `program`.
        """
        parallel = parallel or program
        world, slots = program.facts.world_size, list(program.weights)
        tables = {
            str(operand.target)
            for node in parallel.calls(dialect.embedding.default, dialect.lm_head.default)
            for operand in node.all_input_nodes
            if operand.op == "get_attr"
        }
        return cls(
            facts=program.facts,
            passes=tuple(program.history),
            ops=op_counts(program),
            weight_bytes=sum(slot.bytes for slot in slots),
            rank_bytes=sum(torch.Size(slot.local_shape(world)).numel() * slot.dtype.itemsize for slot in slots),
            whole_bytes=sum(slot.bytes for slot in slots if slot.shard is None and slot.name not in tables),
            reductions=len(parallel.calls(dialect.all_reduce.default)),
            notes=program.facts.notes,
        )

    def summary(self) -> str:
        """One line: the model, how many matches each pass had, and the time."""
        counts = ", ".join(f"{each.name} {each.matches}" for each in self.passes if each.matches)
        total = sum(each.milliseconds for each in self.passes)
        return f"{self.facts.architecture}: {counts} ({total:.0f} ms)"

    def __str__(self) -> str:
        table = Table(title=f"{self.facts.architecture} ({self.facts.model_type})")
        table.add_column("pass")
        for heading in ("stage", "matches", "nodes before", "nodes after", "ms"):
            table.add_column(heading, justify="left" if heading == "stage" else "right")
        for each in self.passes:
            table.add_row(
                each.name,
                each.stage.name,
                str(each.matches),
                str(each.nodes_before),
                str(each.nodes_after),
                f"{each.milliseconds:.1f}",
            )
        text = io.StringIO()
        console = Console(file=text, width=110)
        console.print(table)
        for each in self.passes:
            for refusal in each.refusals:
                console.print(f"{each.name} left {refusal}", markup=False, highlight=False)
        world = self.facts.world_size
        if world > 1:
            rank, total, whole = (size / 2**20 for size in (self.rank_bytes, self.weight_bytes, self.whole_bytes))
            console.print(
                f"rank {self.facts.rank} of {world}: {rank:.1f} of {total:.1f} MiB of weights ({whole:.1f} MiB "
                f"whole on every rank), {self.reductions} reductions",
                markup=False,
                highlight=False,
            )
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        return text.getvalue().rstrip()
