"""Helpers of the transport tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from certificates import Authority

from gossipx.transports import Stream, Transport

InThread = Callable[..., "Future[Any]"]
LONG = 60.0  # seconds: ends a test that hangs
SHORT = 0.2  # seconds: a deadline that must pass


def soon(seconds: float = LONG) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Transport:
    return Authority(tmp_path_factory.mktemp("certificates")).issue().transport()


@pytest.fixture
def in_thread() -> Iterator[InThread]:
    """Yield a function that runs a call in another thread."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def read(stream: Stream, count: int, deadline: float | None = None) -> bytes:
    data = memoryview(bytearray(count))
    done = 0
    while done < count:
        done += stream.receive_into(data[done:], deadline or soon())
    return bytes(data)
