"""A call of Transformers' attention interface becomes the attention op, or an error that names it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxbackend.errors import UnsupportedModelError
from fxbackend.passes.attention import Attention
from fxbackend.pipeline import Pipeline
from fxbackend.testing import check_pass
from tests.small import SelfAttention, start

Mask = tuple[str, int] | None


class Called(SelfAttention):
    """Calls the interface with given operands."""

    def __init__(self, mask: Mask = ("causal", 0), window: int = -1, softcap: float = 0.0, sinks: bool = False):
        super().__init__()
        self.mask, self.window, self.softcap = mask, window, softcap
        self.sinks = nn.Parameter(torch.ones(2)) if sinks else None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = self.mask and torch.ops.fxbackend.attention_mask(torch.empty(0), *self.mask)
        return torch.ops.fxbackend.hf_attention(q, k, v, mask, self.sinks, 0.5, self.softcap, self.window, "body.attn")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0.5, 0, 0.0)),
        ({"mask": None}, (0.5, 0, 0.0)),
        ({"mask": None, "window": 3}, (0.5, 3, 0.0)),
        ({"mask": ("sliding", 3)}, (0.5, 3, 0.0)),
        ({"mask": ("sliding", 3), "window": 3, "softcap": 2.0}, (0.5, 3, 2.0)),
        ({"window": 32}, (0.5, 0, 0.0)),  # as long as the longest sequence: it hides nothing
    ],
)
def test_scale_window_and_cap(options: dict[str, object], expected: tuple[float, int, float]) -> None:
    program, state = start("attention", Called(**options))  # type: ignore[arg-type]
    after = check_pass(program, Attention(), state, matches=1, tolerance=0.0)
    (node,) = after.calls(torch.ops.fxbackend.attention.default)
    assert node.args[3:] == (None, *expected)
    assert node.meta["module"] == "body.attn"


def test_sinks() -> None:
    program, state = start("attention", Called(sinks=True))
    after = check_pass(program, Attention(), state, matches=1)
    (node,) = after.calls(torch.ops.fxbackend.attention.default)
    assert node.args[3].target == "body.sinks"


def test_golden() -> None:
    program, state = start("attention", Called(mask=("sliding", 3)))
    check_pass(
        program,
        Attention(),
        state,
        matches=1,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = aten.embedding(embed.weight, input_ids)
        v2: f32[T, 8] = aten.linear(v1, body.q_proj.weight)
        v3: f32[T, 4] = aten.linear(v1, body.k_proj.weight)
        v4: f32[T, 4] = aten.linear(v1, body.v_proj.weight)
        v5: f32[T, 2, 4] = aten.reshape(v2, [v0, 2, 4])
        v6: f32[2, T, 4] = aten.transpose.int(v5, 0, 1)
        v7: f32[T, 1, 4] = aten.reshape(v3, [v0, 1, 4])
        v8: f32[1, T, 4] = aten.transpose.int(v7, 0, 1)
        v9: f32[T, 1, 4] = aten.reshape(v4, [v0, 1, 4])
        v10: f32[1, T, 4] = aten.transpose.int(v9, 0, 1)
        v11: f32[T, 2, 4] = aten.transpose.int(v6, 0, 1)
        v12: f32[T, 2, 4] = fxbackend.rope(v11, positions, rope_table_0_1, False)
        v13: f32[2, T, 4] = aten.transpose.int(v12, 0, 1)
        v14: f32[T, 1, 4] = aten.transpose.int(v8, 0, 1)
        v15: f32[T, 1, 4] = fxbackend.rope(v14, positions, rope_table_0_1, False)
        v16: f32[1, T, 4] = aten.transpose.int(v15, 0, 1)
        v17: f32[1, 2, T, 4] = aten.unsqueeze(v13, 0)
        v18: f32[1, 1, T, 4] = aten.unsqueeze(v16, 0)
        v19: f32[1, 1, T, 4] = aten.unsqueeze(v10, 0)
        v20: f32[2, T, 4] = aten.squeeze.dim(v17, 0)
        v21: f32[T, 2, 4] = aten.transpose.int(v20, 0, 1)
        v22: f32[1, T, 4] = aten.squeeze.dim(v18, 0)
        v23: f32[T, 1, 4] = aten.transpose.int(v22, 0, 1)
        v24: f32[1, T, 4] = aten.squeeze.dim(v19, 0)
        v25: f32[T, 1, 4] = aten.transpose.int(v24, 0, 1)
        v26: f32[T, 2, 4] = fxbackend.attention(v21, v23, v25, None, 0.5, 3, 0.0)
        v27: f32[1, T, 2, 4] = aten.unsqueeze(v26, 0)
        v28: f32[T, 2, 4] = aten.squeeze.dim(v27, 0)
        v29: f32[T, 8] = aten.reshape(v28, [v0, 8])
        v30: f32[T, 8] = aten.linear(v29, body.o_proj.weight)
        v31: f32[T, 11] = aten.linear(v30, head.weight)
        return v31
    """,
    )


def test_a_layer_that_runs_twice_is_two_attentions() -> None:
    class Twice(Called):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x, positions), positions)

    program, state = start("attention", Twice())
    check_pass(program, Attention(), state, matches=2)


class OwnMask(Called):
    """Brings a mask of its own."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ops.fxbackend.attention_mask(torch.empty(0), "causal", 0) + 1
        return torch.ops.fxbackend.hf_attention(q, k, v, mask, None, 0.5, 0.0, -1, "body.attn")


class OtherLength(Called):
    """The keys are half of the tokens."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (torch.cat((each, each), 2) for each in (k, v))
        return super().attend(q, k, v)


class OtherWidth(Called):
    """Keys are narrower than queries."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.fxbackend.hf_attention(q, k[..., :2], v, None, None, 0.5, 0.0, -1, "body.attn")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: Called(window=3), "sliding_window=3 and a causal mask"),
        (lambda: Called(mask=("sliding", 3), window=4), r"sliding_window=4 and a mask of sliding\(3\)"),
        (OwnMask, "masks made by the model itself are not supported yet"),
        (OtherLength, "only attention of a row to itself is supported"),
        (OtherWidth, "do not fit together"),
    ],
)
def test_what_has_no_meaning_in_a_target_is_an_error(body: type[Called], message: str) -> None:
    program, _state = start("attention", body())
    with pytest.raises(UnsupportedModelError, match=message):
        Pipeline((Attention(),)).run(program, partial=True)
