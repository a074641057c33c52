"""Every op of the dialect against an independent spelling of its equation, and its shape rule against its body."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from fxbackend.ops import OPS, is_dialect, sequences
from fxbackend.program import new_fake_mode

dialect = torch.ops.fxbackend


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


# -- attention ---------------------------------------------------------------------------------------------------------


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    lengths: tuple[int, ...],
) -> torch.Tensor:
    """Token by token, head by head."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2])
    ratio, start = q.shape[1] // k.shape[1], 0
    for length in lengths:
        for token, head in itertools.product(range(start, start + length), range(q.shape[1])):
            first = max(start, token - window + 1) if window else start
            scores = torch.tensor(
                [float(q[token, head] @ k[other, head // ratio]) * scale for other in range(first, token + 1)]
            )
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            powers = scores.exp()
            total = powers.sum() + (sinks[head].exp() if sinks is not None else 0)
            out[token, head] = (powers / total) @ v[first : token + 1, head // ratio]
        start += length
    return out


@pytest.mark.parametrize("lengths", [(9,), (4, 1, 4), (1, 8)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 3, 20])
def test_attention(window: int, softcap: float, sinks: bool, lengths: tuple[int, ...]) -> None:
    q, k, v = rand(9, 4, 6), rand(9, 2, 6), rand(9, 2, 5)
    column = rand(4) if sinks else None
    expected = plain_attention(q, k, v, column, 0.7, window, softcap, lengths)
    with sequences(lengths):
        close(dialect.attention(q, k, v, column, 0.7, window, softcap), expected)


@pytest.mark.parametrize("window", [0, 3])
def test_attention_is_torchs_own(window: int) -> None:
    q, k, v = rand(9, 4, 6), rand(9, 2, 6), rand(9, 2, 6)
    age = torch.arange(9)[:, None] - torch.arange(9)
    mask = (age >= 0) & (age < (window or 9))
    heads = (each.transpose(0, 1)[None] for each in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    close(dialect.attention(q, k, v, None, 0.3, window, 0.0), expected)


def test_sequences_must_fill_the_row() -> None:
    with (
        sequences((3, 3)),
        pytest.raises(ValueError, match=r"sequences of \(3, 3\) tokens do not fill a row of 9 tokens"),
    ):
        dialect.attention(rand(9, 1, 2), rand(9, 1, 2), rand(9, 1, 2), None, 1.0, 0, 0.0)


def test_lengths_are_forgotten_behind_the_block() -> None:
    q = rand(9, 1, 2)
    before = dialect.attention(q, q, q, None, 1.0, 0, 0.0)
    with sequences((4, 5)):
        inside = dialect.attention(q, q, q, None, 1.0, 0, 0.0)
    assert not torch.equal(before, inside)
    assert torch.equal(dialect.attention(q, q, q, None, 1.0, 0, 0.0), before)


@pytest.mark.parametrize(("kind", "size"), [("causal", 0), ("sliding", 3)])
def test_the_interface_call_is_the_attention(kind: str, size: int) -> None:
    q, k, v = rand(9, 4, 6), rand(9, 2, 6), rand(9, 2, 6)
    mask = dialect.attention_mask(torch.empty(0), kind, size)
    heads = (each.transpose(0, 1)[None] for each in (q, k, v))
    found = dialect.hf_attention(*heads, mask, None, 0.3, 0.0, -1, "layer")
    assert torch.equal(found[0], dialect.attention(q, k, v, None, 0.3, size, 0.0))


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm(weighted: bool, offset: float) -> None:
    x, weight = rand(5, 3, 8), rand(8) if weighted else None
    scale = None if weight is None else offset + weight
    close(dialect.rms_norm(x, weight, 1e-3, offset, "before"), F.rms_norm(x, (8,), scale, 1e-3))
    close(dialect.rms_norm(x, weight, 1e-3, offset, "after"), F.rms_norm(x, (8,), scale, 1e-3))


def test_rms_norm_keeps_the_cast_order_in_half_precision() -> None:
    x, weight = rand(64, 32).bfloat16(), rand(32).bfloat16()
    wide = x.double().float()
    normed = wide / (wide.square().sum(-1, keepdim=True) / 32 + 1e-6).sqrt()
    before, after = weight * normed.bfloat16(), (weight.float() * normed).bfloat16()
    assert not torch.equal(before, after)
    found = {cast: dialect.rms_norm(x, weight, 1e-6, 0.0, cast) for cast in ("before", "after")}
    # A last bit of the statistics may differ between spellings; the other cast order differs a hundred times as often.
    assert (found["before"] != before).sum() < 10 < (found["before"] != after).sum()
    assert (found["after"] != after).sum() < 10 < (found["after"] != before).sum()


def test_add_rms_norm_is_a_norm_of_a_sum() -> None:
    x, residual, weight = rand(5, 8), rand(5, 8, seed=1), rand(8)
    normed, total = dialect.add_rms_norm(x, residual, weight, 1e-3, 1.0, "after")
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, dialect.rms_norm(x + residual, weight, 1e-3, 1.0, "after"))


# -- projections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("op", [dialect.linear, dialect.lm_head])
def test_linear_and_head(op: object, biased: bool) -> None:
    x, weight, bias = rand(5, 6), rand(7, 6), rand(7) if biased else None
    expected = torch.stack([sum(weight[:, i] * row[i] for i in range(6)) for row in x])
    close(op(x, weight, bias), expected + (0 if bias is None else bias))  # type: ignore[operator]


def test_qkv_is_three_linears() -> None:
    x, weight, bias = rand(5, 6), rand(8, 6), rand(8)
    parts = dialect.qkv(x, weight, bias, 4, 3, 1)
    for part, start, size in zip(parts, (0, 4, 7), (4, 3, 1), strict=True):
        close(part, dialect.linear(x, weight[start : start + size], bias[start : start + size]))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", lambda x: x / (1 + (-x).exp())),
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
    ],
)
def test_glu_has_its_gate_first(activation: str, function: object) -> None:
    x = rand(5, 12)
    close(dialect.glu(x, activation), function(x[:, :6]) * x[:, 6:])  # type: ignore[operator]


def test_embedding() -> None:
    ids, weight = torch.tensor([3, 0, 3]), rand(5, 4)
    assert torch.equal(dialect.embedding(ids, weight), torch.stack([weight[3], weight[0], weight[3]]))


# -- rope --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_complex_numbers(interleaved: bool, width: int) -> None:
    x, positions = rand(5, 3, 8), torch.tensor([0, 1, 2, 0, 1])
    angles = torch.arange(6)[:, None] * 0.7 ** torch.arange(width // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    turned = x[..., :width].clone()
    first = turned[..., 0::2] if interleaved else turned[..., : width // 2]
    second = turned[..., 1::2] if interleaved else turned[..., width // 2 :]
    numbers = torch.complex(first, second) * torch.polar(torch.ones(5, 1, width // 2), angles[positions][:, None])
    expected = x.clone()
    for index in range(width // 2):
        places = (2 * index, 2 * index + 1) if interleaved else (index, index + width // 2)
        expected[..., places[0]], expected[..., places[1]] = numbers.real[..., index], numbers.imag[..., index]
    close(dialect.rope(x, positions, table, interleaved), expected)
    q, k = dialect.rope_qk(x, x[:, :1], positions, table, interleaved)
    assert torch.equal(q, dialect.rope(x, positions, table, interleaved)) and torch.equal(k, q[:, :1])


def test_rope_sums_in_the_wider_dtype() -> None:
    x, positions = rand(5, 3, 8).bfloat16(), torch.arange(5)
    table = torch.cat(
        ((torch.arange(5)[:, None] * torch.ones(4)).cos(), (torch.arange(5)[:, None] * torch.ones(4)).sin()), -1
    )
    found = dialect.rope(x, positions, table, False)
    assert torch.equal(found, dialect.rope(x.float(), positions, table, False).bfloat16())
    assert not torch.equal(found, dialect.rope(x, positions, table.bfloat16(), False))


# -- collectives and schemas -------------------------------------------------------------------------------------------


def test_collectives_of_one_rank() -> None:
    x = rand(3, 4)
    assert torch.equal(dialect.all_reduce(x), x) and torch.equal(dialect.stage_cut(x, 1), x)
    assert dialect.all_gather(x, 1, 2).shape == (3, 8)


EXAMPLES: dict[str, tuple[object, ...]] = {
    "embedding": (torch.tensor([1, 2, 0, 1, 2]), rand(3, 8)),
    "linear": (rand(5, 8), rand(6, 8), None),
    "lm_head": (rand(5, 8), rand(6, 8), rand(6)),
    "qkv": (rand(5, 8), rand(8, 8), None, 4, 2, 2),
    "glu": (rand(5, 8), "silu"),
    "rms_norm": (rand(5, 8).bfloat16(), rand(8).bfloat16(), 1e-5, 0.0, "before"),
    "add_rms_norm": (rand(5, 8), rand(5, 8), None, 1e-5, 1.0, "after"),
    "rope": (rand(5, 2, 8).bfloat16(), torch.arange(5), rand(5, 4), True),
    "rope_qk": (rand(5, 2, 8), rand(5, 1, 8), torch.arange(5), rand(5, 8), False),
    "attention": (rand(5, 2, 8), rand(5, 1, 8), rand(5, 1, 6), None, 0.5, 2, 0.0),
    "hf_attention": (rand(1, 2, 5, 8), rand(1, 1, 5, 8), rand(1, 1, 5, 6), None, rand(2), 0.5, 1.0, 2, "layer"),
    "attention_mask": (torch.empty(0), "sliding", 3),
    "moe": (
        rand(5, 8),
        torch.tensor([[0, 2]] * 5),
        rand(5, 2),
        rand(3, 8, 8),
        rand(3, 8, 4),
        None,
        rand(3, 8),
        "silu",
        0.0,
        0.0,
    ),
    "hf_experts": (
        rand(5, 8),
        torch.tensor([[0, 2]] * 5),
        rand(5, 2),
        rand(3, 8, 8),
        rand(3, 4, 8),
        rand(3, 8),
        None,
        "gelu",
        0.0,
        0.0,
        True,
        True,
    ),
    "all_reduce": (rand(5, 8),),
    "all_gather": (rand(5, 8), 1, 2),
    "stage_cut": (rand(5, 8), 1),
}


def test_every_op_has_an_example() -> None:
    assert {op.name for op in OPS.values()} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_shape_rule_and_purity(name: str) -> None:
    op, args = getattr(dialect, name).default, EXAMPLES[name]
    assert is_dialect(op) and not op._schema.is_mutable
    before = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    real = op(*args)
    for arg, copy in zip(args, before, strict=True):
        assert not isinstance(arg, torch.Tensor) or torch.equal(arg, copy)
    mode = new_fake_mode()
    with mode:
        fakes = [torch.empty(arg.shape, dtype=arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args]
        fake = op(*fakes)
    for found, expected in zip(*((each if isinstance(each, tuple) else (each,)) for each in (fake, real)), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        # A functional op gives values of their own: no result is a view of an operand.
        assert all(
            expected.untyped_storage()._cdata != arg.untyped_storage()._cdata
            for arg in args
            if isinstance(arg, torch.Tensor)
        )
