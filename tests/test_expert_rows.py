"""The proof of row independence on what routers and experts are made of."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fxbackend.errors import CaptureError, UnsupportedModelError
from fxbackend.hf.zoo import zoo_model
from fxbackend.rewriter import Rewriter
from fxbackend.rows import check_rows
from tests.programs import captured
from tests.test_rows import program_with

aten = torch.ops.aten
dialect = torch.ops.fxbackend


def topk(rw: Rewriter, scores: fx.Node) -> tuple[fx.Node, ...]:
    return rw.calls(aten.topk.default, 2, scores, 2)


def masked_groups(rw: Rewriter, hidden: fx.Node) -> fx.Node:
    """DeepSeek V3: a mask of the chosen groups by scatter, then the choice within them."""
    _, ids = topk(rw, hidden)
    mask = rw.call(aten.scatter.value, rw.call(aten.zeros_like.default, hidden), 1, ids, 1.0)
    kept = rw.call(aten.masked_fill.Scalar, hidden, rw.call(aten.eq.Scalar, mask, 0), 0.0)
    return rw.call(aten.scatter.src, kept, 1, ids, topk(rw, kept)[0])


def routed(rw: Rewriter, hidden: fx.Node) -> fx.Node:
    weights, ids = topk(rw, hidden)
    for name, shape in (("gate_up", (8, 6, 8)), ("down", (8, 8, 3))):
        rw.weights.add_constant(name, torch.randn(shape))
    return rw.call(
        dialect.moe.default, hidden, ids, weights, rw.slot("gate_up"), rw.slot("down"), None, None, "silu", 0.0, 0.0
    )


@pytest.mark.parametrize("build", [masked_groups, routed])
def test_each_token_is_routed_by_itself(build: object) -> None:
    check_rows(program_with(build))  # type: ignore[arg-type]


def along_tokens(rw: Rewriter, hidden: fx.Node) -> fx.Node:
    return rw.call(aten.scatter.value, hidden, 0, topk(rw, hidden)[1], 1.0)


def into_a_table(rw: Rewriter, hidden: fx.Node) -> fx.Node:
    return rw.call(aten.scatter.value, rw.slot("square"), 1, topk(rw, hidden)[1], 1.0)


@pytest.mark.parametrize("build", [along_tokens, into_a_table])
def test_a_write_along_the_tokens_is_refused(build: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"it writes along the tokens|has lost the token dimension"):
        check_rows(program_with(build))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["jetmoe", "dbrx", "longcat_flash"])
def test_a_loop_over_experts_that_reads_ids_on_the_host_is_refused(key: str) -> None:
    with pytest.raises(CaptureError, match="reads the value of a tensor on the host"):
        captured(zoo_model(key))
