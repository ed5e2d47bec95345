"""Signals as requests to stop a peer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from gossipx.runtime.ending import stop_signals
from gossipx.runtime.ending.stop_signals import NUMBERS, StopSignals


@pytest.fixture
def before() -> Iterator[None]:
    """Python's own handlers, as in a script."""
    kept = [signal.signal(number, signal.SIG_DFL) for number in NUMBERS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(NUMBERS, kept, strict=True):
        signal.signal(number, handler)


@pytest.mark.fault(53)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 130)])
def test_the_first_signal_is_a_request_and_decides_the_end(before: None, number: int, code: int) -> None:
    signals = StopSignals()
    signals.install()
    signal.raise_signal(number)
    signal.raise_signal(signal.SIGTERM)
    assert signals.number == number and not signals.at_once
    signals.restore()
    assert signal.getsignal(number) is signal.SIG_DFL
    with pytest.raises(SystemExit) as ended:
        signals.end()
    assert ended.value.code == code


@pytest.mark.fault(53)
@pytest.mark.parametrize("keystrokes", [1, 2])
def test_ctrl_c_that_arrives_twice_is_one(before: None, monkeypatch: pytest.MonkeyPatch, keystrokes: int) -> None:
    """From the terminal and from a launcher, which passes it on."""
    now, told = [100.0], []
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    signals = StopSignals(lambda number: told.append(now[0]))
    signals.install()
    signal.raise_signal(signal.SIGINT)
    now[0] += 0.1
    signal.raise_signal(signal.SIGINT)
    assert signals.number == signal.SIGINT and not signals.at_once and told == [100.0]
    if keystrokes == 2:
        now[0] += 0.5
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.at_once
    signals.restore()
    with pytest.raises(KeyboardInterrupt):
        signals.end()


@pytest.mark.fault(53)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_second_signal_of_any_kind_acts_at_once_where_that_was_said(
    before: None, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Under a parent process, which sends signals of its own, only Ctrl-C does."""
    monkeypatch.setattr(stop_signals, "ONE_KEYSTROKE", 0.0)
    told: list[int] = []
    acted = []
    for signals in (StopSignals(told.append), StopSignals()):
        signals.install()
        signal.raise_signal(signal.SIGTERM)
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        acted.append(signals.at_once)
        signals.restore()
    assert acted == [True, number == signal.SIGINT] and told == [signal.SIGTERM]


@pytest.mark.fault(53)
def test_handlers_of_the_script_are_called_too_and_ignored_signals_stay_ignored(before: None) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, own := lambda number, frame: seen.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = StopSignals()
    signals.install()
    signal.raise_signal(signal.SIGHUP)
    assert signals.number is None
    signal.raise_signal(signal.SIGTERM)
    assert signals.number == signal.SIGTERM == seen[0]
    signal.signal(signal.SIGINT, late := lambda number, frame: None)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is own and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is late, "installed by the script since"


@pytest.mark.fault(53)
def test_forked_processes_have_the_handlers_of_before(before: None) -> None:
    signals = StopSignals()
    signals.install()
    pid = os.fork()
    if pid == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signals._received
    signals.restore()


def test_no_handlers_outside_the_main_thread(before: None) -> None:
    signals = StopSignals()
    thread = threading.Thread(target=lambda: (signals.install(), signals.restore()))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
