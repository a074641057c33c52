"""Every family in the real engine: all log-probabilities of all tokens equal those of Transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf import tiny
from tests.engine import tasks
from tests.engine.forks import Forks

TOLERANCE = 1e-4


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_probabilities_are_those_of_transformers(family: str, forks: Forks, tmp_path: Path) -> None:
    tiny.save_tiny(family, tmp_path)
    done = forks.run(tasks.compare, str(tmp_path))
    assert done.served_by == "FxbackendForCausalLM"
    assert done.worst < TOLERANCE
    assert done.greedy
    assert done.cached >= 32, "prefixes must come from the cache, or the test does not test it"
    assert done.plain == ()
    assert not any(name.startswith("fxbackend.") for name in done.ops)
