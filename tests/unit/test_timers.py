"""Timers, and how they tell a sleep of this process from a long step."""

from __future__ import annotations

import threading

import pytest

from gossipx.runtime.driver import clock

pytestmark = pytest.mark.fault(79)


def test_a_gap_is_a_time_in_which_the_thread_could_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP or a suspend. Not a step of a minute, in which nothing happens and the thread still runs."""
    passed, ran = 0.0, threading.Event()

    def look() -> float:
        if threading.current_thread() is not threading.main_thread():
            ran.set()
        return passed

    monkeypatch.setattr(clock, "_passed", look)
    made = clock.Timers(lambda name: None, "0")
    try:
        for _ in range(6):
            passed += 10.0
            ran.clear()
            assert ran.wait(10)
        assert 10 <= made.gap() <= 20
        assert made.gap() <= 10
        passed += 60.0
        assert made.gap() == 60
    finally:
        made.close()
