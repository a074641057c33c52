"""The proof of row independence: each way to mix tokens is refused by name, and what keeps them apart passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxbackend.errors import UnsupportedModelError
from fxbackend.program import Facts, Program, Stage, new_fake_mode, token_input
from fxbackend.rewriter import Rewriter
from fxbackend.rows import check_rows
from fxbackend.weights import WeightPlan

aten = torch.ops.aten
dialect = torch.ops.fxbackend
Build = Callable[[Rewriter, fx.Node], fx.Node]


def program_with(build: Build) -> Program:
    """A program that computes `build` on hidden states `[T, 8]`."""
    mode = new_fake_mode()
    graph = fx.Graph()
    fake = token_input(mode, "input_ids", (7,), "cpu")
    ids, positions = graph.placeholder("input_ids"), graph.placeholder("positions")
    ids.meta["val"] = fake
    with mode:
        positions.meta["val"] = torch.empty(fake.shape, dtype=torch.int64)
    out = graph.output(ids)
    facts = Facts("Probe", "probe", torch.float32, 64, 8)
    program = Program(graph, WeightPlan(), facts, Stage.SEMANTIC, mode)
    rw = Rewriter(program, "test")
    rw.weights.add_constant("table", torch.randn(11, 8))
    rw.weights.add_constant("square", torch.randn(8, 8))
    with rw.at(out):
        hidden = rw.call(dialect.embedding.default, ids, rw.slot("table"))
        out.args = (build(rw, hidden),)
    return program


def call(target: object, *rest: object) -> Build:
    return lambda rw, hidden: rw.call(target, hidden, *rest)


def count(rw: Rewriter) -> fx.Node:
    return rw.call(aten.sym_size.int, rw.program.inputs()["input_ids"], 0)


APART: dict[str, Build] = {
    "pointwise": call(aten.mul.Tensor, 2.0),
    "softmax over the width": call(aten.softmax.int, 1),
    "mean over the width": call(aten.mean.dim, [1], True),
    "matmul with a weight": lambda rw, h: rw.call(aten.matmul.default, h, rw.slot("square")),
    "heads": lambda rw, h: rw.call(aten.reshape.default, h, [count(rw), 2, 4]),
    "heads first": lambda rw, h: rw.call(aten.transpose.int, rw.call(aten.reshape.default, h, [count(rw), 2, 4]), 0, 1),
    "halves": lambda rw, h: rw.call(
        aten.cat.default, [rw.call(aten.slice.Tensor, h, 1, 4, 8), rw.call(aten.slice.Tensor, h, 1, 0, 4)], 1
    ),
    "a table by position": lambda rw, h: rw.call(
        aten.add.Tensor, h, rw.call(aten.embedding.default, rw.slot("table"), rw.program.inputs()["positions"])
    ),
    "zeros per token": lambda rw, h: rw.call(aten.add.Tensor, h, rw.call(aten.zeros.default, [count(rw), 8])),
}
MIXED: dict[str, tuple[Build, str]] = {
    "softmax over tokens": (call(aten.softmax.int, 0), "runs along the token dimension"),
    "running sum": (call(aten.cumsum.default, 0), "runs along the token dimension"),
    "mean of tokens": (call(aten.mean.dim, [0], True), "lost the token dimension"),
    "mean of all": (call(aten.mean.dim, []), "lost the token dimension|runs over all dimensions"),
    "last token": (call(aten.slice.Tensor, 0, -1, 2**63 - 1), "lost the token dimension|rows, not one per token"),
    "scores": (
        lambda rw, h: rw.call(aten.matmul.default, h, rw.call(aten.transpose.int, h, 0, 1)),
        "relates every token",
    ),
    "gram matrix": (
        lambda rw, h: rw.call(aten.matmul.default, rw.call(aten.transpose.int, h, 0, 1), h),
        "lost the token",
    ),
    "twice": (lambda rw, h: rw.call(aten.cat.default, [h, h], 0), "rows, not one per token"),
    "flip": (call(aten.flip.default, [0]), "runs along the token dimension"),
    "roll": (call(aten.roll.default, [1], [0]), "has no rule"),
    "place in the row": (
        lambda rw, h: rw.call(
            aten.add.Tensor,
            h,
            rw.call(
                aten.unsqueeze.default,
                rw.call(aten.to.dtype, rw.call(aten.arange.default, count(rw)), torch.float32),
                1,
            ),
        ),
        "counts the tokens",
    ),
    "number of tokens": (lambda rw, h: rw.call(aten.mul.Tensor, h, count(rw)), "computes with the number of tokens"),
    "other tokens by index": (
        lambda rw, h: rw.call(aten.index_select.default, h, 0, rw.program.inputs()["positions"]),
        "picks rows among",
    ),
    "tokens moved into the width": (
        lambda rw, h: rw.call(aten.reshape.default, rw.call(aten.transpose.int, h, 0, 1), [count(rw), 8]),
        "view moves",
    ),
    "previous token": (call(aten.slice.Tensor, 0, 0, -1), "rows, not one per token"),
}


@pytest.mark.parametrize("name", APART)
def test_rows_stay_apart(name: str) -> None:
    check_rows(program_with(APART[name]))


@pytest.mark.parametrize("name", MIXED)
def test_a_mixture_is_refused(name: str) -> None:
    build, reason = MIXED[name]
    with pytest.raises(UnsupportedModelError, match=reason):
        check_rows(program_with(build))
