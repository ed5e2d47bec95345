"""Settings of all tests: property tests draw the same examples every time and have no deadline.

Property tests draw 20 examples, and 100 with ``--hypothesis-profile all``; :mod:`property_tests` has those that specify
a number. Tests marked ``cuda`` are skipped without a CUDA device; ``bin/gpu-check`` runs them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_disks
import torch
from hypothesis import HealthCheck, settings
from small_disks import SmallDisk

COMMON = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("all", COMMON)
settings.register_profile("gossipx", COMMON, max_examples=20)
settings.load_profile("gossipx")
torch.set_num_threads(1)  # models are tiny, and tests run beside each other: more threads only wait for each other

for number in (signal.SIGINT, signal.SIGHUP):
    # After 'nohup bin/test &' both are ignored, also by every process that a test starts. A handler that does nothing
    # protects the tests as well, and a new program begins with the system's default.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system with room for 1 MB."""
    with small_disks.small_disk(tmp_path / "small") as disk:
        yield disk


@pytest.fixture(scope="module")
def benches() -> Iterator[Path]:
    """The folder of the benchmarks, whose modules can be imported meanwhile."""
    folder, before = Path(__file__).parents[1] / "bin" / "benches", set(sys.modules)
    sys.path.append(str(folder))  # last: one has the name of a module of the standard library
    yield folder
    sys.path.remove(str(folder))
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests with the longest limits start first: all processes wait for one that starts last."""
    items.sort(key=_limit, reverse=True)


def _limit(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return mark.args[0] if mark else 0.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device is here; bin/gpu-check runs this where there is one")
