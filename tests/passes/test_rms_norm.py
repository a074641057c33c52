"""RMSNorm: the forms that are one, each with its own cast order, and their lookalikes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.passes.rms_norm import RmsNorm
from fxbackend.program import Program
from fxbackend.testing import check_pass
from tests.small import Norm, start


class Body(nn.Module):
    """A norm as a body."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class After(Norm):
    """Olmo2: multiplies in float32, then casts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.normed(x)).to(x.dtype)


class Gemma(Norm):
    """Gemma: multiplies by 1 + weight in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.normed(x) * (1.0 + self.weight.float())).to(x.dtype)


class Bare(Norm):
    """Without weight (Gemma3n's value norm, L2 norms of Llama4)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x).to(x.dtype)


class Divided(Norm):
    """Divides by the root instead of multiplying by its reciprocal."""

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + self.eps)


class PerHead(Norm):
    """Over each head of four (Qwen3's q_norm)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(*x.shape[:2], -1, 4)).reshape(x.shape)


def norm_call(program: Program) -> tuple[object, ...]:
    (node,) = program.calls(torch.ops.fxbackend.rms_norm.default)
    weight = getattr(node.args[1], "target", None)
    return (weight, *node.args[2:])


FORMS = [
    (Norm, ("body.norm.weight", 1e-5, 0.0, "before")),
    (Divided, ("body.norm.weight", 1e-5, 0.0, "before")),
    (Gemma, ("body.norm.weight", 1e-5, 1.0, "after")),
    (Bare, (None, 1e-5, 0.0, "before")),
]


@pytest.mark.parametrize(("form", "expected"), FORMS, ids=lambda each: getattr(each, "__name__", ""))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forms_keep_their_cast_order(form: type[Norm], expected: tuple[object, ...], dtype: torch.dtype) -> None:
    program, state = start("rms_norm", Body(form(8)), dtype=dtype)
    # Not even the last bit changes: the op's body is the same arithmetic in the same order.
    after = check_pass(program, RmsNorm(), state, matches=1, tolerance=0.0 if form is not Divided else 1e-2)
    assert norm_call(after) == expected


def test_olmo2_multiplies_in_float32() -> None:
    program, state = start("rms_norm", Body(After(8)), dtype=torch.bfloat16)
    after = check_pass(program, RmsNorm(), state, matches=1, tolerance=0.0)
    assert norm_call(after) == ("body.norm.weight", 1e-5, 0.0, "after")


def test_golden() -> None:
    program, state = start("rms_norm", Body(Norm(8)), dtype=torch.bfloat16)
    check_pass(
        program,
        RmsNorm(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: bf16[T, 8] = aten.embedding(embed.weight, input_ids)
        v1: bf16[T, 8] = fxbackend.rms_norm(v0, body.norm.weight, 1e-05, 0.0, 'before')
        v2: bf16[T, 11] = fxbackend.linear(v1, head.weight, None)
        return v2
    """,
    )


def test_per_head() -> None:
    program, state = start("rms_norm", Body(PerHead(4)))
    check_pass(program, RmsNorm(), state, matches=1)


def test_two_norms_of_one_value() -> None:
    class Two(Body):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + self.norm(self.norm(x))

    program, state = start("rms_norm", Two(Norm(8)))
    check_pass(program, RmsNorm(), state, matches=3)


class MeanSubtracting(Norm):
    """A layer norm without bias (Cohere)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Squared(Norm):
    """The mean is of another value than is normed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + self.eps))


class Cubed(Norm):
    """Another power."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + self.eps))


class NoEps(Norm):
    """Nothing is added to the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


class Escaping(Norm):
    """The statistics are read by somebody else as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        power = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(power + self.eps)) + power


@pytest.mark.parametrize(
    "lookalike", [MeanSubtracting, Squared, Cubed, NoEps, Escaping], ids=lambda each: each.__name__
)
def test_lookalikes_are_left(lookalike: type[Norm]) -> None:
    program, state = start("rms_norm", Body(lookalike(8)))
    check_pass(program, RmsNorm(), state, matches=0)


def test_the_user_of_an_escaping_value_is_named() -> None:
    program, state = start("rms_norm", Body(Escaping(8)))
    after = check_pass(program, RmsNorm(), state, matches=0)
    nearest = after.history[-1].near_misses[0]
    assert "is used outside of the match by fxv_" in nearest.reason and "body.norm" in nearest.reason


def test_gated_norm_keeps_its_gate() -> None:
    class Gated(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.sigmoid(x)

    program, state = start("rms_norm", Body(Gated(8)))
    after = check_pass(program, RmsNorm(), state, matches=1)
    assert len(after.calls(torch.ops.aten.sigmoid.default)) == 1


def test_refuses_statistics_over_another_dimension() -> None:
    class OverHeads(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(*x.shape[:2], -1, 4)
            power = heads.pow(2).mean(-2, keepdim=True)
            return (self.weight * (heads * torch.rsqrt(power + self.eps))).reshape(x.shape)

    program, state = start("rms_norm", Body(OverHeads(4)))
    # The whole form, and the bare one inside of it.
    check_pass(program, RmsNorm(), state, matches=0, refusals=["not over the last"] * 2)


def test_refuses_statistics_in_half_precision() -> None:
    class Narrow(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

    program, state = start("rms_norm", Body(Narrow(8)), dtype=torch.bfloat16)
    check_pass(program, RmsNorm(), state, matches=0, refusals=["not in float32"] * 2)


def test_refuses_a_weight_that_is_no_vector() -> None:
    class Matrix(Norm):
        def __init__(self, width: int):
            super().__init__(width)
            self.weight = nn.Parameter(torch.ones(2, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.view(*x.shape[:2], -1, 4)).reshape(x.shape)

    program, state = start("rms_norm", Body(Matrix(4)))
    # Cohere's norm of q and k: the bare norm is one, the weight of each head stays a multiplication.
    check_pass(program, RmsNorm(), state, matches=1, refusals=["not a vector of x's width"])


def test_refuses_a_result_of_another_dtype() -> None:
    class Double(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.normed(x).double().cumsum(-1).to(x.dtype)

    program, state = start("rms_norm", Body(Double(8)))
    # The norm inside of the cast is one.
    after = check_pass(program, RmsNorm(), state, matches=1, refusals=["turns torch.float32 into torch.float64"])
    assert len(after.calls(torch.ops.aten.to.dtype)) == 2


def test_a_norm_in_float32_of_a_cast_value() -> None:
    class Wide(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.normed(x).cumsum(-1)).to(x.dtype)

    program, state = start("rms_norm", Body(Wide(8)), dtype=torch.bfloat16)
    check_pass(program, RmsNorm(), state, matches=1, tolerance=0.0)
