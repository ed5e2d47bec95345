"""hivemind's averaging for the exchange benchmark, where hivemind is installed (1.1.12 was tried).

Two averagers in processes of their own, as hivemind makes more. They meet through its DHT, which is not timed; what is,
is the all-reduce of two, after which each has the average.
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
    """An all-reduce whose group is found, and that waits to be begun."""
    from hivemind.averaging.control import AveragingStage

    control = averager.step(wait=False, require_trigger=True, timeout=SECONDS)
    until = time.monotonic() + SECONDS
    while control.stage is not AveragingStage.AWAITING_TRIGGER:
        if control.done() or time.monotonic() > until:
            raise SystemExit(f"hivemind found no group: {control.stage}")
        time.sleep(0.005)
    return control


def _asked() -> Iterator[str]:
    """Lines until END: processes that hivemind has forked keep the pipe open."""
    return iter(sys.stdin.readline, END)


def far(size: int) -> None:
    """Take part in an all-reduce for each line that comes."""
    pin(1)
    dht, averager = _averager(size, [])
    print(*dht.get_visible_maddrs(), flush=True)
    for _ in _asked():
        control = _matched(averager)
        control.allow_allreduce()
        print("ready", flush=True)
        control.result(SECONDS)
    averager.shutdown()
    dht.shutdown()


def near(size: int) -> None:
    """The other side, which tells the seconds of each."""
    pin(0)
    process = subprocess.Popen(
        [sys.executable, __file__, "far", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    dht, averager = _averager(size, process.stdout.readline().split())
    print("", flush=True)
    for _ in _asked():
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
    """An all-reduce of two; tells its own seconds."""

    def __init__(self, size: int):
        self._process, _ = start(__file__, "near", size, stdin=subprocess.PIPE)
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
    {"near": near, "far": far}[sys.argv[1]](int(sys.argv[2]))
