"""Which causal language models of Transformers are converted, and how far their logits are from Transformers' own.

Every type of the zoo is examined in a forked child process: what crashes or hangs there becomes a row of the table.
Rows are appended to a file of JSON lines as they come, and a run goes on where the last one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fxbackend.errors import CaptureError, InputError, LoweringError, UnsupportedModelError

TIMEOUT = 120.0  # seconds a type may take
TOLERANCE = 1e-4  # largest difference over largest logit
LENGTHS = (17, 9)  # of the prompts: longer than the zoo's windows, and different
_REFUSALS = (CaptureError, UnsupportedModelError, LoweringError)

_HEAD = """# Coverage

Written by `fxbackend coverage --markdown`; do not edit.

A tiny random model of every type in Transformers' causal language-model mapping, converted, and its logits compared
with those of Transformers: eager attention, float32, two prompts of different length in one row. The error is the
largest difference over the largest logit.
"""


@dataclass(frozen=True)
class Row:
    """What is known of one type.

    Attributes:
        key: the model type, or `type:variant`.
        outcome: `right`, `wrong`, `refused` (one sentence says why), `failed` (any other error, a crash, a timeout) or
            `excluded` (Transformers itself has no tiny text-only model of it).
        captured: whether there was a graph.
        converted: whether all passes ran.
        error: largest difference to Transformers' logits, over two prompts in one row.
        scale: the largest of those logits.
        reason: the first line of the error.
        seconds: all of it, building the model included.
    """

    key: str
    outcome: str = "failed"
    captured: bool = False
    converted: bool = False
    error: float | None = None
    scale: float | None = None
    reason: str = ""
    seconds: float = 0.0

    @property
    def relative(self) -> float | None:
        """The error as a part of the largest logit."""
        return None if self.error is None or not self.scale else self.error / self.scale


def zoo_keys(wanted: Iterable[str] = ()) -> dict[str, str]:
    """The keys of the zoo, or those of them that are wanted; each with the reason why it is left out, mostly none.

    Raises:
        InputError: one is not in the zoo.
    """
    import fxbackend.hf.source  # here, once, and not in every child
    import fxbackend.pipelines  # noqa: F401
    from fxbackend.hf.zoo import model_types
    from fxbackend.hf.zoo_types import EXCLUDED

    known = {key: EXCLUDED.get(key, "") for key in sorted({*model_types(), *EXCLUDED})}
    wanted = list(wanted) or list(known)
    for key in wanted:
        if key not in known:
            raise InputError(
                f"{key!r} is no type of causal language model in Transformers and no variant of the zoo: "
                "use the model_type of its config.json, or give nothing to examine all."
            )
    return {key: known[key] for key in wanted}


def examine(key: str) -> Row:
    """Builds, captures, converts and compares one type; every exception becomes the row's reason."""
    row = Row(key)
    try:
        from fxbackend.hf.source import open_source
        from fxbackend.hf.tiny import hf_logits
        from fxbackend.hf.zoo import zoo_model
        from fxbackend.pipelines import default_pipeline
        from fxbackend.targets.reference import ReferenceModel

        model = zoo_model(key)
        prompts = _prompts(model.config.get_text_config(decoder=True).vocab_size)
        expected = torch.cat([hf_logits(model, prompt) for prompt in prompts])
        program, state = open_source(model).captured(None)
        row = dataclasses.replace(row, captured=True)
        program = default_pipeline().run(program)
        row = dataclasses.replace(row, converted=True)
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        assert state is not None
        logits = ReferenceModel(program, state)(torch.cat(prompts), positions, [len(prompt) for prompt in prompts])
        return _compared(row, logits, expected)
    except Exception as error:
        outcome = "refused" if isinstance(error, _REFUSALS) else "failed"
        return dataclasses.replace(row, outcome=outcome, reason=_reason(error))


def _prompts(vocabulary: int) -> list[torch.Tensor]:
    """Without the ids of padding and of other special tokens, which stand at the beginning."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, vocabulary, (length,), generator=generator) for length in LENGTHS]


def _compared(row: Row, logits: torch.Tensor, expected: torch.Tensor) -> Row:
    if logits.shape != expected.shape:
        reason = f"logits are {list(logits.shape)}, expected {list(expected.shape)}"
        return dataclasses.replace(row, outcome="wrong", reason=reason)
    error, scale = (logits - expected).abs().max().item(), expected.abs().max().item()
    row = dataclasses.replace(row, error=error, scale=scale)
    right = row.relative is not None and row.relative <= TOLERANCE  # not so when it is no number
    return dataclasses.replace(row, outcome="right" if right else "wrong", reason="" if right else "other logits")


def _reason(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, _REFUSALS):
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} (at {Path(last.filename).name}:{last.lineno})"


def in_child(function: Callable[[str], Row], key: str, timeout: float = TIMEOUT) -> Row:
    """`function(key)` in a forked child, so that a crash stays there."""
    start = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(function, key, sender))
    child.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(timeout) else Row(key, reason=f"no answer within {timeout:.0f} s")
    except EOFError:
        child.join()
        row = Row(key, reason=_death(child.exitcode))
    finally:
        child.kill()
        child.join()
        receiver.close()
    return dataclasses.replace(row, seconds=round(time.perf_counter() - start, 2))


def _child(function: Callable[[str], Row], key: str, sender: Connection) -> None:
    torch.set_num_threads(1)  # threads of the parent do not survive a fork
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what libraries say there would break the progress display
        os.dup2(nowhere, stream)
    sender.send(function(key))
    sender.close()


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process died of {signal.Signals(-code).name}"
    return f"its process ended with status {code} and without an answer"


def run(
    keys: Mapping[str, str],
    output: Path | None = None,
    function: Callable[[str], Row] = examine,
    timeout: float = TIMEOUT,
    console: Console | None = None,
) -> list[Row]:
    """Examines `keys`, those left out that `output` holds already, and appends every row to it.

    Args:
        keys: what to examine; one with a reason becomes an excluded row.
        output: a file of JSON lines.
        function: what examines one key; its row may come from anything, such as an engine.
        timeout: seconds per key.
        console: where progress is shown.
    """
    known = {row.key: row for row in read(output)} if output is not None and output.exists() else {}
    todo = [key for key in keys if key not in known]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(keys), completed=len(keys) - len(todo))
        for key in todo:
            progress.update(task, description=key)
            known[key] = Row(key, "excluded", reason=keys[key]) if keys[key] else in_child(function, key, timeout)
            if output is not None:
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(known[key])) + "\n")
            progress.advance(task)
    return [known[key] for key in keys]


def read(path: Path) -> Iterator[Row]:
    """The rows of a file that `run` wrote."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield Row(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{path}:{number} is no row of a coverage run: name another file, or remove this one."
            ) from error


def totals(rows: Iterable[Row]) -> str:
    """One sentence."""
    rows = list(rows)
    outcomes = Counter(row.outcome for row in rows)
    examined = len(rows) - outcomes["excluded"]
    return (
        f"{examined} models examined: {sum(row.captured for row in rows)} captured, "
        f"{sum(row.converted for row in rows)} converted, {outcomes['right']} right within {TOLERANCE:g} of the "
        f"largest logit, {outcomes['wrong']} wrong, {outcomes['refused']} refused, {outcomes['failed']} failed; "
        f"{outcomes['excluded']} types excluded."
    )


def table(rows: Iterable[Row]) -> Table:
    """For a terminal."""
    result = Table("type", "outcome", "captured", "converted", "error / scale", "s", "reason")
    for row in rows:
        result.add_row(row.key, row.outcome, *_cells(row), f"{row.seconds:.1f}", row.reason.replace("[", r"\["))
    return result


def markdown(rows: Iterable[Row]) -> str:
    """The page of the documentation."""
    rows = list(rows)
    lines = [
        _HEAD,
        totals(rows),
        "",
        "| type | outcome | captured | converted | error | reason |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        reason = row.reason.replace("|", r"\|").replace("<", "&lt;")
        lines.append(f"| {row.key} | {row.outcome} | " + " | ".join(_cells(row)) + f" | {reason} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, str, str]:
    error = "" if row.relative is None else f"{row.relative:.1e}"
    return "yes" if row.captured else "", "yes" if row.converted else "", error
