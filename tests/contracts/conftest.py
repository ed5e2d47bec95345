"""Every way that models travel, for the contracts of CommManagers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from managers import WAYS, Host, certify, runs, settings_of, shares_memory

MARKS = {"shm": shares_memory, "nccl": pytest.mark.cuda}


@pytest.fixture(
    params=[pytest.param(name, marks=[mark for kind, mark in MARKS.items() if kind in name]) for name in WAYS]
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
