"""Signals to the parent of the peers on this machine: interruption and requests to leave."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launches
import pytest
from launches import NAMES, Capture, Run, gone

from gossipx.launch.run import processes, stopping
from gossipx.metrics.summary import FILE, Summary, read
from gossipx.runtime.ending import stop_signals
from gossipx.runtime.ending.stop_signals import NUMBERS, StopSignals

run, mine = launches.run, launches.mine


# --- signals ------------------------------------------------------------------------------------------


@pytest.mark.fault(53)
def test_peers_that_do_not_stop_are_named_and_killed_at_last(
    run: Run, tmp_path: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Ctrl-C while a peer hangs in foreign code."""
    monkeypatch.setattr(stopping, "STOP_GRACE", 0.5)
    body = """
        (here / "pid").write_text(str(os.getpid()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train()
        os.kill(os.getppid(), signal.SIGINT)
        wait()
    """
    assert run(body, peers="localhost", peer_timeout=0.5) == 130
    assert gone(int((tmp_path / "pid").read_text(encoding="utf-8")))
    printed = capsys.readouterr()
    assert not (mine / FILE).exists() and printed.err == ""
    lines = printed.out.splitlines()
    assert lines[-3].startswith(f"waiting for {NAMES[0]} (train 5) to stop; killed in ")
    assert lines[-2] == f"killed, because they did not stop: {NAMES[0]} (train 5)"
    assert lines[-1] == "stopped at once; there is no checkpoint to continue from"


@pytest.mark.fault(53)
@pytest.mark.parametrize("first", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_second_interrupt_kills_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: str
) -> None:
    """The child reacts to the first signal by sending the second; without it, the grace period is an hour."""
    monkeypatch.setattr(stopping, "STOP_GRACE", 3600.0)
    body = f"""
        signal.signal(signal.SIGTERM, lambda *_: ((here / "asked").touch(), os.kill(os.getppid(), signal.SIGINT)))
        os.kill(os.getppid(), signal.{first})
        wait()
    """
    assert run(body, peers="localhost") == 130
    assert (tmp_path / "asked").exists()


@pytest.mark.fault(53)
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 0), ("SIGHUP", 130)])
def test_launchers_and_terminals_may_send_a_signal_twice(run: Run, mine: Path, number: str, code: int) -> None:
    """The first is not followed by a kill: the peer still reports its figures."""
    body = f"""
        leave_when_asked()
        leave = signal.getsignal(signal.SIGTERM)
        def send_again(*_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getppid(), signal.{number})
            print("one more", flush=True)
            leave()
        signal.signal(signal.SIGTERM, send_again)
        train()
        os.kill(os.getppid(), signal.{number})
        wait()
    """
    assert run(body, peers="localhost") == code
    summary = read(mine)
    assert (summary.stopped, summary.lost, summary.iterations) == ([NAMES[0]], [], 5)
    assert summary.retrievals == [10]


@pytest.mark.fault(53)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_the_summary_is_written_does_not_lose_it(
    run: Run, mine: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Launchers may send a signal twice, the second time when the peers have ended already. Afterwards the handlers are
    those of before."""
    write = Summary.write

    def signalled(*given: Any, **named: Any) -> None:
        os.kill(os.getpid(), number)
        write(*given, **named)

    def own(*given: object) -> None:
        pytest.fail("the run did not take the signal")

    monkeypatch.setattr(Summary, "write", signalled)
    before = signal.signal(number, own)
    try:
        assert run("stop_alone()", peers="localhost") == 0
    finally:
        assert signal.signal(number, before) is own
    assert read(mine).stopped == [NAMES[0]]


@pytest.mark.fault(53)
def test_an_ignored_hangup_stays_ignored(run: Run) -> None:
    """``nohup gossipx run``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run("train(); os.kill(os.getppid(), signal.SIGHUP); finish()", peers="localhost") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.fault(53)
def test_errors_and_output_of_peers_that_stop_are_shown(run: Run, tmp_path: Path, mine: Path, capsys: Capture) -> None:
    """One peer cannot write its checkpoint, and reports no figures; the other is not ended by that."""
    os.mkfifo(tmp_path / "ready")
    body = """
        def fail(*_):
            print("cleaning up", flush=True)
            tell(error="checkpoints: No space left on device; make room", exit=1)
            sys.exit(1)
        train()
        if rank == 0:
            signal.signal(signal.SIGTERM, fail)
            assert (here / "ready").read_text() == "yes"
            os.kill(os.getppid(), signal.SIGINT)
        else:
            leave_when_asked()
            (here / "ready").write_text("yes")
        wait()
    """
    assert run(body, peers="localhost slots=2") == 130
    printed = capsys.readouterr().out
    assert f"{NAMES[0]}: checkpoints: No space left on device; make room\n" in printed
    assert f"[{NAMES[0]}] cleaning up\n" in printed
    assert read(mine).lost == [NAMES[0]] and read(mine).stopped == [NAMES[1]]


@pytest.mark.fault(4)
def test_a_peer_that_leaves_on_request_has_neither_finished_nor_failed(
    run: Run, tmp_path: Path, mine: Path, capsys: Capture
) -> None:
    """SIGTERM arrives when one peer has finished and the other has not."""
    os.mkfifo(tmp_path / "finished")
    body = """
        if rank == 0:
            finish()
            (here / "finished").write_text("yes")
            sys.exit()
        def leave(*_):
            tell(state="left", step=3, iterations=10, loss=None, accuracy=None, retrievals=1, bytes=1)
            sys.exit()
        signal.signal(signal.SIGTERM, leave)
        assert (here / "finished").read_text() == "yes"
        os.kill(os.getppid(), signal.SIGTERM)
        wait()
    """
    assert run(body, peers="localhost slots=2") == 0
    summary = read(mine)
    assert summary.lost == [NAMES[1]] and summary.retrievals == [10, None]
    assert "is lost: " not in capsys.readouterr().out


def test_a_signal_that_arrives_while_peers_are_started_reaches_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    really = processes.Child

    def interrupted(*arguments: Any, **options: Any) -> Any:
        child = really(*arguments, **options)
        signal.raise_signal(signal.SIGINT)  # the parent has not recorded this child yet
        return child

    monkeypatch.setattr(stopping, "STOP_GRACE", 3600.0)
    monkeypatch.setattr(processes, "Child", interrupted)
    assert run("wait()", peers="localhost") == 130


# --- Signals as requests to stop a peer ----------------------------------------------------------------


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
