"""The text form of a program: what goes in comes out, and what this version does not know is an error."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import fxbackend
from fxbackend import default_pipeline
from fxbackend.errors import InputError
from fxbackend.hf.tiny import FAMILIES, tiny_config, tiny_model
from fxbackend.printer import program_text
from fxbackend.program import Program, Stage
from fxbackend.serialize import from_text, load_program, program_hash, save_program, to_text
from fxbackend.verify import verify


def program(model_type: str, stage: Stage = Stage.FUSED) -> Program:
    return fxbackend.convert(tiny_config(model_type), passes=default_pipeline().until(stage)).program


def same(one: Program, other: Program) -> None:
    assert to_text(other) == to_text(one)
    assert program_text(other) == program_text(one)
    assert str(other.weights) == str(one.weights)
    assert (other.facts, other.stage, other.history) == (one.facts, one.stage, one.history)
    assert program_hash(other) == program_hash(one)
    assert other.fake_mode is not one.fake_mode
    verify(other)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_round_trip(model_type: str) -> None:
    one = program(model_type)
    same(one, from_text(to_text(one), one.weights.constants))


@pytest.mark.parametrize("stage", [Stage.CANONICAL, Stage.SEMANTIC])
def test_round_trip_of_earlier_stages(stage: Stage) -> None:
    one = program("gemma2", stage)
    same(one, from_text(to_text(one), one.weights.constants))


def test_a_captured_program_runs_through_the_passes_after_loading(tmp_path: Path) -> None:
    captured = fxbackend.convert(tiny_config("llama"), passes=fxbackend.Pipeline(())).program
    save_program(captured, tmp_path)
    loaded = load_program(tmp_path)
    same(captured, loaded)
    one, other = (default_pipeline().run(each) for each in (captured, loaded))
    assert program_text(one) == program_text(other)


def test_numbers_after_a_round_trip(tmp_path: Path) -> None:
    model = tiny_model("gemma3_text")
    one = fxbackend.convert(model).program
    save_program(one, tmp_path)
    other = load_program(tmp_path)
    ids = torch.randint(0, 199, (13,))
    inputs = {"input_ids": ids, "positions": torch.arange(13)}
    state = model.state_dict()
    expected = one.run(inputs, one.weights.materialise(state))
    assert torch.equal(other.run(inputs, other.weights.materialise(state)), expected)


def test_constants_that_share_memory_and_special_numbers(tmp_path: Path) -> None:
    one = program("llama")
    name, table = next(iter(one.weights.constants.items()))
    one.weights.add_constant("view", table[1:])
    one.weights.drop("view")
    one.weights.constants[name] = table.t().contiguous().t()  # not contiguous
    save_program(one, tmp_path)
    assert torch.equal(load_program(tmp_path).weights.constants[name], table)
    node = one.calls(torch.ops.fxbackend.attention.default)[0]
    node.args = (*node.args[:6], float("inf"))
    same_args = from_text(to_text(one), one.weights.constants).calls(torch.ops.fxbackend.attention.default)[0].args
    assert same_args[6] == float("inf")


def test_the_text_holds_no_machine(tmp_path: Path) -> None:
    data = json.loads(to_text(program("llama")))
    assert "cpu" not in json.dumps(data)
    assert {node["op"] for node in data["nodes"]} == {"placeholder", "get_attr", "call_function", "output"}
    made = {node["made_by"] for node in data["nodes"] if node.get("target") == "fxbackend.qkv.default"}
    assert made == {"fuse_qkv"}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"format": 1', '"format": 99', "format 99, and this version .* reads format 1"),
        ("fxbackend.qkv.default", "fxbackend.quark.default", "'fxbackend.quark.default', which this version"),
        ("fxbackend.qkv.default", "os.system.default", "'os.system.default', which this version"),
        ('{\n "format"', '"format"', "no JSON"),
        ('"constants": [', '"constants": ["lost", ', "holds no \\['lost'\\]"),
    ],
)
def test_unknown_text_is_refused(old: str, new: str, says: str) -> None:
    one = program("llama")
    text = to_text(one)
    assert old in text
    with pytest.raises(InputError, match=says):
        from_text(text.replace(old, new), one.weights.constants)


def test_a_directory_without_a_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no program.json"):
        load_program(tmp_path)


def test_the_hash_tells_pipelines_models_and_facts_apart() -> None:
    config = tiny_config("llama")
    pipelines = [default_pipeline(), default_pipeline().without("fuse_qkv"), default_pipeline().until(Stage.SEMANTIC)]
    programs = [fxbackend.convert(config, passes=each).program for each in pipelines]
    programs.append(fxbackend.convert(config, max_model_len=32).program)
    programs.append(fxbackend.convert(config, dtype="bfloat16").program)
    rank = dataclasses.replace(programs[0].facts, rank=1, world_size=2)
    programs.append(dataclasses.replace(programs[0], facts=rank))
    assert len({program_hash(each) for each in programs}) == len(programs)
    assert program_hash(fxbackend.convert(config).program) == program_hash(programs[0])
