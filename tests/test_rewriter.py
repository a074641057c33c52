"""The one gateway for edits: where new nodes come from, what they carry, what goes when nothing reads it."""

from __future__ import annotations

import pytest
import torch

from fxbackend.errors import PipelineError
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from fxbackend.rewriter import Rewriter
from fxbackend.testing import Wrapped, before, program_of
from fxbackend.verify import verify
from tests.small import SelfAttention, start

aten = torch.ops.aten
dialect = torch.ops.fxbackend


@pytest.fixture
def program() -> Program:
    return start("fuse_qkv", SelfAttention(bias=True))[0]


def test_new_nodes_inherit_their_place_and_record_the_pass(program: Program) -> None:
    rw = Rewriter(program, "mine")
    (attention,) = program.calls(dialect.attention.default)
    with rw.at(attention):
        node = rw.call(aten.neg.default, attention.args[0])
    assert node.meta["module"] == attention.meta["module"] and node.meta["made_by"] == "mine"
    assert node.meta["val"].shape == attention.args[0].meta["val"].shape
    assert node.name.startswith("fxv_") and node.next is attention
    assert len({each.name for each in program.graph.nodes}) == len(program.graph.nodes)


def test_a_call_without_a_place_is_an_error(program: Program) -> None:
    with pytest.raises(PipelineError, match="mine inserts a node outside of"):
        Rewriter(program, "mine").call(aten.neg.default, program.output())


def test_replacing_removes_what_only_the_old_value_needed(program: Program) -> None:
    rw = Rewriter(program, "mine")
    (attention,) = program.calls(dialect.attention.default)
    q, _k, v = attention.args[:3]
    rope_count = len(program.calls(dialect.rope.default))
    with rw.at(attention):
        rw.replace({attention: rw.call(aten.mul.Tensor, rw.call(aten.expand.default, v, [-1, 2, 4]), 2)})
    assert attention._erased and q._erased and len(program.calls(dialect.rope.default)) == rope_count - 2
    rw.sweep()
    assert program.weights.ignored["body.q_proj.weight"] == "the graph does not read it"
    verify(program, inside=True)


def test_a_slot_is_read_by_one_node_in_front_of_all_calls(program: Program) -> None:
    rw = Rewriter(program, "mine")
    known = {str(node.target): node for node in program.graph.find_nodes(op="get_attr")}
    assert rw.slot("body.q_proj.weight") is known["body.q_proj.weight"]
    stacked = rw.stack("both", [known["body.k_proj.weight"], known["body.v_proj.weight"]])
    assert stacked.meta["val"].shape == (8, 8) and rw.slot("both") is stacked
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(stacked < node for node in calls)


def test_a_write_to_memory_is_not_swept() -> None:
    class Writes(torch.nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            fresh = x + 1
            fresh[..., :4].mul_(2)
            return fresh

    program, _state = start("functionalize", Writes())
    Rewriter(program, "mine").sweep()
    assert len(program.calls(aten.mul_.Tensor)) == 1


def test_a_copy_is_independent() -> None:
    program = before(default_pipeline(), "fuse_qkv", program_of_attention())
    text, plan = str(program.graph), str(program.weights)
    copied = program.copy()
    rw = Rewriter(copied, "mine")
    (attention,) = copied.calls(dialect.attention.default)
    with rw.at(attention):
        rw.replace({attention: rw.call(aten.neg.default, attention.args[0])})
    rw.sweep()
    assert (str(program.graph), str(program.weights)) == (text, plan)


def program_of_attention() -> Program:
    return program_of(Wrapped(SelfAttention(), 8))
