"""What the engine tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.engine.forks import Forks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/engine/" in str(item.path):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """A warmed process that runs each engine in a child of its own."""
    warmed = Forks()
    yield warmed
    warmed.close()
