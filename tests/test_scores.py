"""Score functions are read off their values, whatever their spelling."""

from __future__ import annotations

import pytest
import torch

from fxbackend.scores import ScoreFunction, Scores, UnknownScores, read_scores

HEADS = 4
LENGTHS = (2, 5, 13, 24)


def ages(length: int) -> torch.Tensor:
    return torch.arange(length).unsqueeze(1) - torch.arange(length)


def causal(scores: torch.Tensor, value: float = -1e4) -> torch.Tensor:
    return scores.masked_fill(ages(scores.shape[-1]) < 0, value)


def read(function: ScoreFunction) -> Scores:
    return read_scores(lambda length: function, HEADS, LENGTHS)


@pytest.mark.parametrize("value", [-1e4, -1e9, float("-inf"), torch.finfo(torch.float32).min])
def test_a_mask_is_any_large_negative(value: float) -> None:
    assert read(lambda s: causal(s * 0.25, value)) == Scores(0.25, 0.0, 0, None)


def test_a_mask_added_before_the_scale() -> None:
    hidden = torch.finfo(torch.float32).min
    assert read(lambda s: (s + (ages(s.shape[-1]) < 0) * hidden) / 5.656854) == Scores(0.1767767, 0.0, 0, None)


def test_a_mask_applied_twice() -> None:
    assert read(lambda s: causal(causal(s, -1e9), -1e9) + (ages(s.shape[-1]) < 0) * -1e9) == Scores(1.0, 0.0, 0, None)


@pytest.mark.parametrize("window", [1, 4, 12])
def test_a_window_shows_in_rows_longer_than_it(window: int) -> None:
    found = read(lambda s: causal(s).masked_fill(ages(s.shape[-1]) >= window, -1e4))
    assert found == Scores(1.0, 0.0, window, None)


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_a_soft_cap(cap: float) -> None:
    found = read(lambda s: causal(cap * torch.tanh(s * 0.3 / cap)))
    assert found.softcap == pytest.approx(cap, rel=1e-3) and found.scale == pytest.approx(0.3, rel=1e-3)


def test_alibi_by_the_key_or_by_the_distance() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    by_key = read(lambda s: causal(s + slopes[:, None, None] * torch.arange(s.shape[-1])))
    by_distance = read(lambda s: causal(s - slopes[:, None, None] * ages(s.shape[-1])))
    assert by_key == by_distance == Scores(1.0, 0.0, 0, tuple(slopes.tolist()))


def test_what_a_row_has_in_common_does_not_count() -> None:
    assert read(lambda s: causal(s + torch.arange(s.shape[-1]).unsqueeze(1))) == Scores(1.0, 0.0, 0, None)


WRONG = {
    "no mask": (lambda s: s, "neither causal nor a causal window"),
    "a prefix that sees itself both ways": (
        lambda s: torch.where((ages(s.shape[-1]) < 0) & (torch.arange(s.shape[-1]) > 1), -1e4, s),
        "neither causal",
    ),
    "chunks": (
        lambda s: torch.where(
            torch.arange(s.shape[-1]).unsqueeze(1) // 4 == torch.arange(s.shape[-1]) // 4, causal(s), -1e4
        ),
        "neither causal",
    ),
    "heads that see different tokens": (
        lambda s: torch.cat((causal(s[:2]), causal(s[2:]).masked_fill(ages(s.shape[-1]) >= 1, -1e4))),
        "heads see different tokens|neither causal",
    ),
    "a square of the scores": (lambda s: causal(s * s), "neither a multiple of the product nor a soft cap"),
    "scores cut off": (lambda s: causal(s.clamp(-1, 1)), "neither a multiple of the product nor a soft cap"),
    "a bias that is no slope": (
        lambda s: causal(s + torch.log1p(ages(s.shape[-1]).clamp(min=0).float())),
        "no ALiBi slope",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_function_is_refused(name: str) -> None:
    function, reason = WRONG[name]
    with pytest.raises(UnknownScores, match=reason):
        read(function)  # type: ignore[arg-type]
