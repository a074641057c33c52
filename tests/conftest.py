"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_numbers() -> Iterator[None]:
    """Every test starts from the same random state, whichever ran before, and leaves the default dtype as it was."""
    # The tracer's own log, a line per symbol, would bury the reports of failures.
    logging.getLogger("torch.__trace").propagate = False
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
