"""A pipeline: a frozen tuple of passes, run in the order that stands there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fxbackend.errors import FxBackendError, PipelineError
from fxbackend.observers import Observer
from fxbackend.pass_base import Pass
from fxbackend.program import PassRecord, Program, Stage
from fxbackend.rewriter import Rewriter
from fxbackend.verify import verify


@dataclass(frozen=True)
class Pipeline:
    """Passes in order. Stages check the order, they do not sort it.

    Raises:
        PipelineError: a pass stands after one of a later stage, or a name occurs twice.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        for before, after in zip(self.passes, self.passes[1:], strict=False):
            if after.stage < before.stage:
                raise PipelineError(
                    f"pass {after.name!r} works on stage {after.stage.name} and stands after {before.name!r} of stage "
                    f"{before.stage.name}: move it before."
                )
        names = [each.name for each in self.passes]
        if doubles := {name for name in names if names.count(name) > 1}:
            raise PipelineError(f"passes {sorted(doubles)} occur more than once.")

    def __add__(self, other: Pipeline) -> Pipeline:
        return Pipeline(self.passes + other.passes)

    def index(self, name: str) -> int:
        """Where the pass `name` stands."""
        for index, each in enumerate(self.passes):
            if each.name == name:
                return index
        raise PipelineError(f"no pass {name!r} in this pipeline; it has {[each.name for each in self.passes]}.")

    def without(self, name: str) -> Pipeline:
        """The pipeline without the pass `name`."""
        index = self.index(name)
        return Pipeline(self.passes[:index] + self.passes[index + 1 :])

    def after(self, name: str, *added: Pass) -> Pipeline:
        """The pipeline with `added` right after the pass `name`."""
        index = self.index(name) + 1
        return Pipeline(self.passes[:index] + added + self.passes[index:])

    def until(self, stage: Stage) -> Pipeline:
        """The passes up to and including those of `stage`."""
        return Pipeline(tuple(each for each in self.passes if each.stage <= stage))

    def before(self, name: str) -> Pipeline:
        """The passes in front of the pass `name`."""
        return Pipeline(self.passes[: self.index(name)])

    def run(self, program: Program, observers: Sequence[Observer] = (), partial: bool = False) -> Program:
        """Runs every pass on a copy of `program` and verifies it at each stage border.

        Args:
            program: where to start; it is not changed.
            observers: what watches.
            partial: the last pass is not the last of its stage, so what the stage promises is not asked at the end.

        Raises:
            FxBackendError: whatever a pass refused or broke, with the names of the passes that had run.
        """
        program = program.copy()
        for observer in observers:
            observer.before_all(program)
        for index, each in enumerate(self.passes):
            try:
                self._run_pass(each, program, observers)
                following = self.passes[index + 1].stage if index + 1 < len(self.passes) else None
                if following is not each.stage:
                    verify(program, inside=partial and following is None)
            except FxBackendError as error:
                done = ", ".join(record.name for record in program.history) or "none"
                if hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"in pass {each.name}; passes that had run: {done}")
                raise
        for observer in observers:
            observer.after_all(program)
        return program

    def _run_pass(self, each: Pass, program: Program, observers: Sequence[Observer]) -> None:
        if each.stage < program.stage:
            raise PipelineError(
                f"pass {each.name!r} works on stage {each.stage.name}; the program is {program.stage.name} already."
            )
        for observer in observers:
            observer.before_pass(program, each.name)
        before, start = len(program.graph.nodes), time.perf_counter()
        rw = Rewriter(program, each.name)
        each.run(rw)
        rw.sweep()
        program.stage = each.stage
        record = PassRecord(
            name=each.name,
            stage=each.stage,
            matches=rw.matches,
            nodes_before=before,
            nodes_after=len(program.graph.nodes),
            milliseconds=(time.perf_counter() - start) * 1e3,
            changed=rw.edits > 0,
            refusals=tuple(rw.refusals),
            near_misses=tuple(rw.near_misses),
        )
        program.history.append(record)
        for observer in observers:
            observer.after_pass(program, record)
