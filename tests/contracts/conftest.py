"""Every way that models travel, for the contracts of CommManagers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from managers import TRANSPORTS, Host, certify, runs, settings_of, shares_memory

MARKS = {"shm": shares_memory, "nccl": pytest.mark.cuda}
PAIR = ("tcp, secret", "shm")
"""Ways of tests that are not about the path of the data, by default: a network with a secret, and shared memory."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of other ways to ``bin/test --all``, unless they are marked ``every_transport``."""
    for item in items:
        way = getattr(item, "callspec", None) and item.callspec.params.get("way")
        if way in TRANSPORTS and way not in PAIR and item.get_closest_marker("every_transport") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(
    params=[pytest.param(name, marks=[mark for kind, mark in MARKS.items() if kind in name]) for name in TRANSPORTS]
)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    certify(name, tmp_path)
    return name


@pytest.fixture
def start(way: str, tmp_path: Path) -> Iterator[Callable[[int], list[Host]]]:
    """Starts the peers of a run; all end with the test and leave no thread."""
    with runs() as make:

        def started(size: int) -> list[Host]:
            run = make(size)
            return [run.host(rank, **settings_of(way, tmp_path, rank)) for rank in range(size)]

        yield started
