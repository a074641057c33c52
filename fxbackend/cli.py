"""The command `fxbackend`.

`fxbackend convert MODEL` prints the report, `fxbackend graph MODEL` the program, `fxbackend coverage` what becomes of
every causal language model of Transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fxbackend.convert import convert
from fxbackend.errors import FxBackendError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "coverage":
            return _coverage(options.type, options.output, options.markdown)
        converted = convert(
            options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            trust_remote_code=options.trust_remote_code,
            dump=options.dump,
        )
    except FxBackendError as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    if options.command == "graph":
        from fxbackend.printer import program_text

        print(program_text(converted.program), end="")
    else:
        print(converted.report)
    return 0


def _coverage(keys: list[str], output: Path | None, markdown: Path | None) -> int:
    from rich.console import Console

    from fxbackend import coverage

    rows = coverage.run(coverage.zoo_keys(keys), output)
    Console().print(coverage.table(rows), coverage.totals(rows), highlight=False)
    if markdown is not None:
        markdown.write_text(coverage.markdown(rows), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxbackend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("convert", "convert a model and print what every pass did"),
        ("graph", "convert a model and print its rewritten graph"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("model", help="a model directory or id; its weights are not needed")
        command.add_argument("--dtype", help="of the activations (default: that of the model)")
        command.add_argument("--max-model-len", type=int, help="positions of a sequence (default: as the config says)")
        command.add_argument("--trust-remote-code", action="store_true", help="run code of the model directory")
        command.add_argument("--dump", metavar="DIR", help="write the graph after every pass below this directory")
    text = "convert a tiny model of every causal type of Transformers, and compare the logits with its own"
    command = commands.add_parser("coverage", help=text, description=text)
    command.add_argument("type", nargs="*", help="model types, or type:variant (default: all of them)")
    command.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="append the rows to this file of JSON lines; types it holds already are not examined again",
    )
    command.add_argument("--markdown", metavar="FILE", type=Path, help="write the table as a page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
