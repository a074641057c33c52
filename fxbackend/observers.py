"""Observers watch a pipeline run; passes know nothing of them."""

from __future__ import annotations

from fxbackend.program import PassRecord, Program
from fxbackend.verify import verify


class Observer:
    """Hooks around a run and around each pass; all do nothing by default."""

    def before_all(self, program: Program) -> None:
        """Before the first pass."""

    def before_pass(self, program: Program, name: str) -> None:
        """Before each pass."""

    def after_pass(self, program: Program, record: PassRecord) -> None:
        """After each pass, with what it did."""

    def after_all(self, program: Program) -> None:
        """After the last pass."""


class VerifyEachPass(Observer):
    """Runs `verify` after every pass (tests do; a normal run verifies at stage borders)."""

    def after_pass(self, program: Program, record: PassRecord) -> None:
        """Verifies the program against its current stage."""
        verify(program, inside=True)
