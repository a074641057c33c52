"""The report of a conversion: printable, and data."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fxbackend.printer import op_counts
from fxbackend.program import Facts, PassRecord, Program


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Attributes:
        facts: of the model.
        passes: one record per pass, in order.
        ops: how often each op occurs in the result.
        weight_bytes: size of all weight slots, over all ranks.
        notes: sentences worth knowing (frozen rope frequencies, replicated blocks).
    """

    facts: Facts
    passes: tuple[PassRecord, ...]
    ops: dict[str, int]
    weight_bytes: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, program: Program) -> Report:
        """The report of a program, from its history."""
        size = sum(slot.bytes for slot in program.weights)
        return cls(program.facts, tuple(program.history), op_counts(program), size, program.facts.notes)

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
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False)
        return text.getvalue().rstrip()
