"""Every promise of a stage, broken once."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxbackend.errors import VerifyError
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program, Stage
from fxbackend.testing import Wrapped, before, program_of
from fxbackend.verify import verify
from tests.small import SelfAttention

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@pytest.fixture(scope="module")
def captured() -> Program:
    return program_of(Wrapped(SelfAttention(), 8))


@pytest.fixture
def program(captured: Program) -> Program:
    return default_pipeline().run(captured)


def broken(program: Program, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(program)


def insert(program: Program, target: Callable[..., object], *args: object, op: str = "call_function") -> fx.Node:
    """A node at the end of the graph, with the value of the output."""
    (end,) = program.graph.find_nodes(op="output")
    with program.graph.inserting_before(end):
        node = program.graph.create_node(op, target, args)  # type: ignore[arg-type]
    node.meta["val"] = program.output().meta["val"]
    return node


def test_what_the_pipeline_makes_is_sound(program: Program, captured: Program) -> None:
    verify(captured)
    verify(program)


def test_the_graph_is_well_formed(program: Program) -> None:
    (attention,) = program.calls(dialect.attention.default)
    first = program.calls(dialect.embedding.default)[0]
    first.prepend(attention)
    broken(program, "not well formed")


def test_every_node_has_a_value(program: Program) -> None:
    del program.calls(dialect.attention.default)[0].meta["val"]
    broken(program, r"fxbackend.attention.*in body has no value in meta\['val'\]")


def test_only_functions_are_called(program: Program) -> None:
    insert(program, "relu", program.output(), op="call_method")  # type: ignore[arg-type]
    broken(program, "a program calls functions only")


def test_only_aten_and_the_dialect_are_called(program: Program) -> None:
    insert(program, torch.relu, program.output())
    broken(program, "is no ATen or dialect op")


def test_inputs(program: Program) -> None:
    first = next(iter(program.graph.nodes))
    with program.graph.inserting_before(first):
        program.graph.placeholder("mask").meta["val"] = first.meta["val"]
    broken(program, r"inputs are \['mask', 'input_ids', 'positions'\]")


def test_the_token_dimension_is_symbolic(program: Program) -> None:
    with program.fake_mode:
        program.inputs()["input_ids"].meta["val"] = torch.empty(7, dtype=torch.int64)
    broken(program, r"input input_ids is \[7\]: the token dimension must be the last, and symbolic")


def test_the_batch_axis_is_gone_from_canonical_form_on(captured: Program) -> None:
    program = captured.copy()
    program.stage = Stage.CANONICAL
    broken(program, r"input input_ids is \[1, s\d+\]")


def test_the_output_is_a_row_per_token(program: Program) -> None:
    (end,) = program.graph.find_nodes(op="output")
    end.args = (program.calls(dialect.attention.default)[0],)
    broken(program, "is not one row of logits per token")


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.detach.default, ()),
        (aten.view.default, ([-1, 11],)),
        (aten.chunk.default, (2,)),
    ],
)
def test_canonical_spellings(program: Program, target: Callable[..., object], args: tuple[object, ...]) -> None:
    insert(program, target, program.output(), *args)
    broken(program, "canonicalize must have removed this spelling")


def test_canonical_programs_are_functional(program: Program) -> None:
    insert(program, aten.add_.Tensor, program.output(), 1)
    broken(program, "writes to its operand; a canonical program is functional")


def test_no_attention_of_the_interface_is_left(captured: Program) -> None:
    program = before(default_pipeline(), "attention", captured)
    verify(program, inside=True)
    broken(program, "a call of Transformers' interface was not rewritten")


def test_no_dialect_op_is_left_after_lowering(program: Program) -> None:
    program.stage = Stage.LOWERED
    broken(program, "no dialect op may be left after lowering")


def test_tuples_may_be_read(program: Program) -> None:
    assert program.calls(operator.getitem)
    verify(program)


def test_every_slot_is_in_the_plan(program: Program) -> None:
    del program.weights.slots["head.weight"]
    broken(program, r"the graph reads \['head.weight'\], which the weight plan does not hold")


def test_every_slot_of_the_plan_is_read(program: Program) -> None:
    program.weights.add_constant("more", torch.zeros(2))
    broken(program, r"the weight plan holds \['more'\], which the graph does not read")


def test_every_slot_is_filled_by_one_recipe(program: Program) -> None:
    program.weights.constants["head.weight"] = torch.zeros(11, 8)
    broken(program, "'head.weight' must be filled by pieces or by a constant, and by one of them")
    del program.weights.constants["head.weight"]
    program.weights.replace("head.weight", pieces=())
    broken(program, "'head.weight' must be filled by pieces or by a constant, and by one of them")


def test_slots_have_the_shape_that_the_graph_reads(program: Program) -> None:
    program.weights.replace("head.weight", shape=(12, 8))
    broken(program, r"'head.weight' is \(12, 8\), the graph says \(11, 8\)")


def test_slots_have_the_dtype_that_the_graph_reads(program: Program) -> None:
    program.weights.replace("head.weight", dtype=torch.bfloat16)
    broken(program, "'head.weight' is torch.bfloat16, the graph says torch.float32")
