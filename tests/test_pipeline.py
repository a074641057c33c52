"""Pipelines: their order is checked, not sorted, and an error says what had run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest

from fxbackend.errors import PipelineError, UnsupportedModelError
from fxbackend.observers import Observer
from fxbackend.pass_base import Pass
from fxbackend.passes.canonicalize import Canonicalize
from fxbackend.passes.fuse_glu import FuseGlu
from fxbackend.passes.rms_norm import RmsNorm
from fxbackend.pipeline import Pipeline
from fxbackend.pipelines import default_pipeline
from fxbackend.program import PassRecord, Program, Stage
from fxbackend.rewriter import Rewriter
from fxbackend.testing import Wrapped, program_of
from tests.small import SelfAttention


@dataclass(frozen=True)
class Raises(Pass):
    """Refuses every model."""

    name: ClassVar[str] = "raises"
    stage: ClassVar[Stage] = Stage.SEMANTIC

    def run(self, rw: Rewriter) -> None:
        raise UnsupportedModelError("no model is good enough.")


@dataclass(frozen=True)
class WithOptions(Raises):
    """Has options."""

    heads: int = 2
    label: str = "x"


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(Wrapped(SelfAttention(), 8))


def test_a_pass_behind_one_of_a_later_stage_is_an_error() -> None:
    with pytest.raises(
        PipelineError, match="'rms_norm' works on stage SEMANTIC and stands after 'fuse_glu' of stage FUSED"
    ):
        Pipeline((Canonicalize(), FuseGlu(), RmsNorm()))


def test_a_pass_that_occurs_twice_is_an_error() -> None:
    with pytest.raises(PipelineError, match=r"\['rms_norm'\] occur more than once"):
        Pipeline((RmsNorm(), RmsNorm()))


def test_a_pass_on_a_program_of_a_later_stage_is_an_error(program: Program) -> None:
    fused = default_pipeline().run(program)
    with pytest.raises(PipelineError, match="'rms_norm' works on stage SEMANTIC; the program is FUSED already"):
        Pipeline((RmsNorm(),)).run(fused)


def test_editing() -> None:
    names = [each.name for each in default_pipeline().passes]
    without = default_pipeline().without("rms_norm")
    assert [each.name for each in without.passes] == [name for name in names if name != "rms_norm"]
    added = without.after("linear", RmsNorm())
    assert added.index("rms_norm") == added.index("linear") + 1
    assert {each.stage for each in added.until(Stage.CANONICAL).passes} == {Stage.CANONICAL}
    assert [each.name for each in default_pipeline().before("rope").passes] == names[: names.index("rope")]
    assert (Pipeline((Canonicalize(),)) + Pipeline((FuseGlu(),))).index("fuse_glu") == 1
    with pytest.raises(PipelineError, match="no pass 'nothing' in this pipeline; it has"):
        added.without("nothing")


def test_passes_are_values() -> None:
    assert RmsNorm() == RmsNorm() and default_pipeline() == default_pipeline()
    assert str(WithOptions(3)) == "raises(heads=3, label='x')" and str(RmsNorm()) == "rms_norm"
    with pytest.raises(dataclasses.FrozenInstanceError):
        WithOptions().heads = 4  # type: ignore[misc]


def test_an_error_says_what_had_run(program: Program) -> None:
    pipeline = default_pipeline().until(Stage.CANONICAL) + Pipeline((Raises(),))
    with pytest.raises(UnsupportedModelError) as error:
        pipeline.run(program)
    if hasattr(error.value, "__notes__"):
        assert error.value.__notes__ == [
            "in pass raises; passes that had run: fill_buffers, functionalize, decompose, canonicalize, "
            "canonicalize_views, drop_batch_axis"
        ]


def test_the_program_that_is_handed_in_is_not_changed(program: Program) -> None:
    text, plan = str(program.graph), str(program.weights)
    default_pipeline().run(program)
    assert (str(program.graph), str(program.weights), program.stage) == (text, plan, Stage.CAPTURED)
    assert program.history == []


def test_observers_see_every_pass(program: Program) -> None:
    seen: list[str] = []

    class Watch(Observer):
        def before_all(self, program: Program) -> None:
            seen.append("start")

        def before_pass(self, program: Program, name: str) -> None:
            seen.append(f"before {name}")

        def after_pass(self, program: Program, record: PassRecord) -> None:
            seen.append(f"after {record.name}")
            assert record.nodes_after == len(program.graph.nodes) and program.history[-1] is record

        def after_all(self, program: Program) -> None:
            seen.append("end")

    default_pipeline().run(program, [Watch()])
    names = [each.name for each in default_pipeline().passes]
    assert seen == ["start", *(f"{when} {name}" for name in names for when in ("before", "after")), "end"]


def test_a_second_run_of_the_fusions_changes_nothing(program: Program) -> None:
    fused = default_pipeline().run(program)
    fusions = Pipeline(tuple(each for each in default_pipeline().passes if each.stage is Stage.FUSED))
    again = fusions.run(fused)
    assert [record.changed for record in again.history[len(fused.history) :]] == [False] * len(fusions.passes)
