"""hivemind's averaging for the exchange benchmark, if hivemind is installed (tested with 1.1.12).

Two averagers run in separate processes, because hivemind itself starts more. They find each other through its DHT,
which is not timed. The all-reduce of the two is timed; after it each has the average.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from _remote import HERE, SECONDS, end_with_parent, pin, start

END = "end\n"


def _averager(size: int, peers: list[str]) -> tuple[Any, Any]:
    import hivemind

    dht = hivemind.DHT(start=True, initial_peers=peers, host_maddrs=[f"/ip4/{HERE}/tcp/0"])
    tensors = [torch.ones(size // 4)]
    settings = {
        "prefix": "bench",
        "target_group_size": 2,
        "min_matchmaking_time": 1.0,
        "request_timeout": 0.5,
        "start": True,
    }
    return dht, hivemind.averaging.DecentralizedAverager(tensors, dht, **settings)


def _matched(averager: Any) -> Any:
    """Return an all-reduce whose group is complete and that waits for its trigger."""
    from hivemind.averaging.control import AveragingStage

    control = averager.step(wait=False, require_trigger=True, timeout=SECONDS)
    until = time.monotonic() + SECONDS
    while control.stage is not AveragingStage.AWAITING_TRIGGER:
        if control.done() or time.monotonic() > until:
            raise SystemExit(f"hivemind found no group: {control.stage}")
        time.sleep(0.005)
    return control


def _requests() -> Iterator[str]:
    """Yield lines until END. The pipe itself does not end, because hivemind's forked processes keep it open."""
    return iter(sys.stdin.readline, END)


def remote(size: int) -> None:
    """Take part in one all-reduce per line of standard input."""
    pin(1)
    dht, averager = _averager(size, [])
    print(*dht.get_visible_maddrs(), flush=True)
    for _ in _requests():
        control = _matched(averager)
        control.allow_allreduce()
        print("ready", flush=True)
        control.result(SECONDS)
    averager.shutdown()
    dht.shutdown()


def local(size: int) -> None:
    """Run the timed side, which prints the seconds of each all-reduce."""
    pin(0)
    process = subprocess.Popen(
        [sys.executable, __file__, "remote", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    dht, averager = _averager(size, process.stdout.readline().split())
    print("", flush=True)
    for _ in _requests():
        print("again", file=process.stdin, flush=True)
        control = _matched(averager)
        process.stdout.readline()
        began = time.perf_counter()
        control.allow_allreduce()
        control.result(SECONDS)
        print(time.perf_counter() - began, flush=True)
    print(END, end="", file=process.stdin, flush=True)
    process.wait(SECONDS)
    averager.shutdown()
    dht.shutdown()


class Hivemind:
    """A client for all-reduces of two, whose duration is measured by the process ``local``."""

    def __init__(self, size: int):
        self._process, _ = start(__file__, "local", size, stdin=subprocess.PIPE)
        self.seconds = 0.0

    def pull(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("again", file=self._process.stdin, flush=True)
        self.seconds = float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        print(END, end="", file=self._process.stdin, flush=True)
        self._process.wait(SECONDS)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    {"local": local, "remote": remote}[sys.argv[1]](int(sys.argv[2]))
