"""The rules of patterns, each once: what commutes, what is the same value, what may be seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx, nn

from fxbackend.errors import MatchError, PipelineError
from fxbackend.matcher import Match, Miss, candidates, match
from fxbackend.pass_base import PatternPass, Refuse
from fxbackend.pattern import Expression, cast, items, keep, number, op, rsqrt, shared, slot, var
from fxbackend.pipeline import Pipeline
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program, Stage
from fxbackend.rewriter import Rewriter
from fxbackend.testing import Wrapped, before, program_of

aten = torch.ops.aten
X, Y = var("x"), var("y")
Function = Callable[[torch.Tensor], torch.Tensor]


class Body(nn.Module):
    """A function of the hidden states, with a weight at hand."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def canonical(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Program:
    program = program_of(Wrapped(Body(function), 8), dtype=dtype)
    return before(default_pipeline(), "raise_attention", program)


def last(program: Program) -> fx.Node:
    """The last node of the body: what the head projects."""
    head = program.output()
    assert head.target is aten.linear.default
    return head.args[0]  # type: ignore[return-value]


def found(
    pattern: Expression, function: Callable[..., torch.Tensor], dtype: torch.dtype = torch.float32
) -> Match | Miss | None:
    return match({"pattern": pattern}, last(canonical(function, dtype)))


@pytest.mark.parametrize("function", [lambda x, w: x.exp() * x.sin(), lambda x, w: x.sin() * x.exp()])
def test_products_commute(function: Function) -> None:
    pattern = op(aten.exp.default, X) * op(aten.sin.default, X)
    assert isinstance(found(pattern, function), Match)


@pytest.mark.parametrize("function", [lambda x, w: x.exp() + x.sin(), lambda x, w: x.sin() + x.exp()])
def test_sums_commute(function: Function) -> None:
    pattern = op(aten.exp.default, X) + op(aten.sin.default, X)
    assert isinstance(found(pattern, function), Match)


def test_differences_do_not_commute() -> None:
    pattern = op(aten.exp.default, X) - op(aten.sin.default, X)
    assert isinstance(found(pattern, lambda x, w: x.exp() - x.sin()), Match)
    assert not isinstance(found(pattern, lambda x, w: x.sin() - x.exp()), Match)


def test_commuted_choices_are_undone_when_they_lead_nowhere() -> None:
    pattern = (op(aten.exp.default, X) * Y) * op(aten.sin.default, Y)
    result = found(pattern, lambda x, w: (x.sin()) * (x.abs().exp() * x))
    assert isinstance(result, Match) and result.node("x").target is aten.abs.default


def test_the_same_name_twice_is_the_same_value() -> None:
    pattern = op(aten.exp.default, X) * op(aten.sin.default, X)
    assert not isinstance(found(pattern, lambda x, w: x.exp() * x.cos().sin()), Match)
    scaled = op(aten.exp.default, X * number("n")) * op(aten.sin.default, X * number("n"))
    assert isinstance(found(scaled, lambda x, w: (x * 2).exp() * (x * 2).sin()), Match)
    assert not isinstance(found(scaled, lambda x, w: (x * 2).exp() * (x * 3).sin()), Match)


def test_a_cast_is_invisible_only_where_cast_is_written() -> None:
    def wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x.float().exp().to(x.dtype).sin()

    plain = op(aten.sin.default, op(aten.exp.default, X))
    assert not isinstance(found(plain, wide, torch.bfloat16), Match)
    result = found(op(aten.sin.default, cast(op(aten.exp.default, cast(X)))), wide, torch.bfloat16)
    assert isinstance(result, Match)
    # The larger match: x is the value before its cast.
    assert result.node("x").meta["val"].dtype == torch.bfloat16
    assert isinstance(
        found(op(aten.sin.default, cast(op(aten.exp.default, cast(X)))), lambda x, w: x.exp().sin()), Match
    )


def test_kinds_of_captures() -> None:
    assert isinstance(found(X * slot("w"), lambda x, w: x * w), Match)
    assert not isinstance(found(X * slot("w"), lambda x, w: x * x.exp()), Match)
    assert isinstance(found(X * number("n"), lambda x, w: x * 0.5), Match)
    assert not isinstance(found(X * number("n"), lambda x, w: x * w), Match)


def test_literals_lists_and_keywords() -> None:
    halves = op(aten.cat.default, items(X, Y), 1)
    assert isinstance(found(halves, lambda x, w: torch.cat((x.exp()[..., :4], x[..., 4:]), -1)), Match)
    assert not isinstance(found(halves, lambda x, w: torch.cat((x[..., :4], x[..., :2], x[..., :2]), -1)), Match)
    tanh = op(aten.gelu.default, X, approximate="tanh")
    assert isinstance(found(tanh, lambda x, w: nn.functional.gelu(x, approximate="tanh")), Match)
    assert not isinstance(found(tanh, lambda x, w: nn.functional.gelu(x)), Match)
    assert isinstance(found(X + 1.0, lambda x, w: x + 1), Match)


def test_alternatives() -> None:
    power = X + number("eps")
    pattern = Y * (rsqrt(power) | op(aten.reciprocal.default, op(aten.sqrt.default, power)))
    assert isinstance(found(pattern, lambda x, w: x * (x.abs() + 1e-3).rsqrt()), Match)
    assert isinstance(found(pattern, lambda x, w: x * (x.abs() + 1e-3).sqrt().reciprocal()), Match)


def test_an_interior_value_with_a_user_outside_refuses_and_names_the_user() -> None:
    pattern = op(aten.sin.default, op(aten.exp.default, X * 2))
    program = canonical(lambda x, w: (lambda inner: inner.sin() * inner.abs())((x * 2).exp()))
    (root,) = program.calls(aten.sin.default)
    (user,) = program.calls(aten.abs.default)
    result = match({"pattern": pattern}, root)
    assert isinstance(result, Miss) and result.node.target is aten.exp.default
    assert result.reason == f"{result.node.name} is used outside of the match by {user.name} (body)"


def test_kept_values_may_be_seen_and_shared_ones_stay() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inner = x.exp()
        return inner.sin() * inner.abs()

    program = canonical(function)
    (root,) = program.calls(aten.sin.default)
    (inner,) = program.calls(aten.exp.default)
    kept = match({"pattern": op(aten.sin.default, keep("inner", op(aten.exp.default, X)))}, root)
    assert isinstance(kept, Match) and kept.node("inner") is inner and kept.point is inner
    stays = match({"pattern": op(aten.sin.default, shared(op(aten.exp.default, X)))}, root)
    assert isinstance(stays, Match) and stays.nodes == {root}


def test_the_first_variant_wins() -> None:
    program = canonical(lambda x, w: x.exp().sin())
    result = match(
        {"long": op(aten.sin.default, op(aten.exp.default, X)), "short": op(aten.sin.default, X)}, last(program)
    )
    assert isinstance(result, Match) and result.pattern == "long"
    every = [
        each.pattern
        for each in candidates({"short": op(aten.sin.default, X), "any": op(aten.sin.default, Y)}, last(program))
        if isinstance(each, Match)
    ]
    assert every == ["short", "any"]


def test_the_nearest_miss_is_told() -> None:
    pattern = op(aten.sin.default, op(aten.exp.default, op(aten.abs.default, op(aten.cos.default, X))))
    result = found(pattern, lambda x, w: x.tanh().abs().exp().sin())
    assert isinstance(result, Miss)
    assert result.reason == "expected aten.cos.default, found aten.tanh.default" and result.depth == 3
    assert found(pattern, lambda x, w: x.sin()) is None  # not near


@dataclass(frozen=True)
class Double(PatternPass):
    """`exp(x * n) = exp(x) ** n`, with some of the ways to be wrong."""

    name: ClassVar[str] = "double"
    stage: ClassVar[Stage] = Stage.CANONICAL
    mode: str = "right"

    def patterns(self) -> Mapping[str, Expression]:
        return {"double": op(aten.exp.default, X * number("n"))}

    def check(self, match: Match) -> None:
        if match.number("n") == 3:
            raise Refuse("three is not supported")

    def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
        if self.mode == "drops x":
            return rw.call(aten.exp.default, match.root.args[0])
        power = rw.call(aten.pow.Tensor_Scalar, rw.call(aten.exp.default, match.node("x")), match.number("n"))
        return rw.call(aten.to.dtype, power, torch.float64) if self.mode == "casts" else power


def test_a_capture_that_is_neither_used_nor_proved_away_is_an_error() -> None:
    program = canonical(lambda x, w: (x * 2).exp())
    with pytest.raises(
        MatchError, match=r"double: captures \['x'\] of pattern 'double' were neither used nor proved away"
    ):
        Pipeline((Double("drops x"),)).run(program)


def test_a_replacement_of_another_type_is_an_error() -> None:
    program = canonical(lambda x, w: (x * 2).exp())
    with pytest.raises(PipelineError, match=r"replaces fxv_\d+ f32\[T, 8\] \(body\) by f64\[T, 8\]"):
        Pipeline((Double("casts"),)).run(program)


def test_a_refusal_keeps_its_reason_and_its_place() -> None:
    program = canonical(lambda x, w: (x * 3).exp() + (x * 2).exp())
    record = Pipeline((Double(),)).run(program).history[-1]
    assert record.matches == 1
    (refusal,) = record.refusals
    assert (refusal.module, refusal.reason) == ("body", "three is not supported")


def test_a_check_that_refuses_one_way_lets_the_next_be_tried() -> None:
    class Ordered(Double):
        def patterns(self) -> Mapping[str, Expression]:
            return {"sum": op(aten.exp.default, X + Y)}

        def check(self, match: Match) -> None:
            if match.node("x").target is not aten.sin.default:
                raise Refuse("x is no sine")

        def rewrite(self, rw: Rewriter, match: Match) -> fx.Node:
            parts = [rw.call(aten.exp.default, match.node(name)) for name in ("x", "y")]
            return rw.call(aten.mul.Tensor, *parts)

    record = Pipeline((Ordered(),)).run(canonical(lambda x, w: (x.cos() + x.sin()).exp())).history[-1]
    assert (record.matches, record.refusals) == (1, ())
    record = Pipeline((Ordered(),)).run(canonical(lambda x, w: (x.cos() + x.tan()).exp())).history[-1]
    assert (record.matches, [each.reason for each in record.refusals]) == (0, ["x is no sine"])


def test_near_misses_are_ranked() -> None:
    class Long(Double):
        def patterns(self) -> Mapping[str, Expression]:
            return {
                "long": op(aten.exp.default, op(aten.sin.default, op(aten.cos.default, op(aten.abs.default, X) * 2)))
            }

    program = canonical(lambda x, w: x.cos().sin().exp() * (x * 2).cos().sin().exp() * x.cos().sin())
    misses = Pipeline((Long(),)).run(program).history[-1].near_misses
    assert ["aten.abs.default" in miss.reason for miss in misses] == [True, False]
