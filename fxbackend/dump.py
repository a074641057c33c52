"""Writes a conversion to disk for `FXBACKEND_DUMP`: every graph, what each pass changed, a summary, the weight plan.

    fxbackend_dump/001_LlamaForCausalLM/rank0/000_captured.txt
                                              004_rope/before.txt  after.txt  diff.txt
                                              summary.txt  weights.txt

Folders are numbered by conversion, passes by their place in the pipeline. What lies there already is never touched.
"""

from __future__ import annotations

import difflib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fxbackend import settings
from fxbackend.observers import Observer
from fxbackend.printer import program_text
from fxbackend.program import PassRecord, Program
from fxbackend.report import Report

_RUN_FILE = ".run"


def observers_from_settings(name: str, rank: int = 0, world: int = 1, directory: Path | None = None) -> list[Observer]:
    """The observers of a conversion as the environment asks for them.

    Args:
        name: of the model class; the folder is named after it.
        rank: of this process, over tensor and pipeline ranks together.
        world: how many of them there are; ranks started by one parent share a folder.
        directory: where to dump whatever the environment says.
    """
    base = directory or settings.dump_directory()
    return [] if base is None else [Dump(new_folder(base, name, rank, world))]


def new_folder(base: Path, name: str, rank: int = 0, world: int = 1) -> Path:
    """Makes and returns the folder of one rank of a new conversion, `<next free number>_<name>/rank<rank>`.

    Of several ranks the first makes the numbered folder, and the others of the same parent process join it.
    """
    base.mkdir(parents=True, exist_ok=True)
    run = f"{os.getppid()} {world}"
    with _locked(base):
        numbered = {int(path.name[:3]): path for path in sorted(base.iterdir()) if path.name[:3].isdigit()}
        if world > 1:
            for path in numbered.values():
                if _is_run(path, name, run) and not (path / f"rank{rank}").exists():
                    return _made(path / f"rank{rank}")
        folder = _made(base / f"{max(numbered, default=0) + 1:03d}_{name}")
        (folder / _RUN_FILE).write_text(run, encoding="utf-8")
        return _made(folder / f"rank{rank}")


def _is_run(path: Path, name: str, run: str) -> bool:
    mark = path / _RUN_FILE
    return path.name[4:] == name and mark.is_file() and mark.read_text(encoding="utf-8") == run


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """One process at a time looks for the next free number."""
    handle = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class Dump(Observer):
    """Writes one rank's view of a conversion into `folder`.

    One object may watch several runs in a row (to the fused program, then to a target): numbers go on.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._before = ""

    def before_all(self, program: Program) -> None:
        """The graph as captured."""
        path = self.folder / "000_captured.txt"
        if not path.exists():
            path.write_text(program_text(program), encoding="utf-8")

    def before_pass(self, program: Program, name: str) -> None:
        """Keeps the text for the comparison."""
        self._before = program_text(program)

    def after_pass(self, program: Program, record: PassRecord) -> None:
        """A folder for a pass that changed something, and the summary so far."""
        after = program_text(program)
        if after != self._before:
            folder = self.folder / f"{len(program.history):03d}_{record.name}"
            folder.mkdir()
            (folder / "before.txt").write_text(self._before, encoding="utf-8")
            (folder / "after.txt").write_text(after, encoding="utf-8")
            (folder / "diff.txt").write_text(_diff(self._before, after), encoding="utf-8")
        (self.folder / "summary.txt").write_text(summary(program), encoding="utf-8")

    def after_all(self, program: Program) -> None:
        """The summary and the weight plan."""
        (self.folder / "summary.txt").write_text(summary(program), encoding="utf-8")
        (self.folder / "weights.txt").write_text(f"{program.weights}\n", encoding="utf-8")


def summary(program: Program) -> str:
    """The report, and below it where the patterns of each pass nearly matched."""
    lines = [str(Report.of(program))]
    for record in program.history:
        lines += [f"{record.name} nearly matched {miss}" for miss in record.near_misses]
    return "\n".join(lines) + "\n"


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), "before", "after")
    return "".join(lines)
