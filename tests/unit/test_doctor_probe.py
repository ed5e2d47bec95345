"""One probe of ``gossipx doctor``, from the process that asks to the one that answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from gossipx.launch.hosts import PeerLine
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools.doctor.listener import Listener
from gossipx.tools.doctor.probe import Prober, probing
from gossipx.transports import tcp
from gossipx.transports.access import grant
from gossipx.transports.link import Links
from gossipx.wire import Hello


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Threads of this process that are not the doctor's."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(100)]
    for thread in threads:
        thread.start()
    yield
    done.set()
    for thread in threads:
        thread.join()


def test_a_probe_counts_for_every_host_name_of_a_machine(many_threads: None) -> None:
    """Hosts b and c are one machine, whose load to host a counts as a probe by both."""
    peers = [PeerLine(rank, name, 0, None, f"{name}-0", rank + 1) for rank, name in enumerate("abc")]
    access = grant(ExchangeSettings(), "127.0.0.1")

    def prober(rank: int, aliases: list[str]) -> Prober:
        me = Hello(rank, peers[rank].name, 3, "digest", "")
        return Prober(me, aliases, peers, b"one\nother", b"", access, Links("doctor", 0, 10.0), threading.Lock())

    answering, asking = prober(0, []), prober(1, ["c-0"])
    listener = Listener(peers[:1], {0: "127.0.0.1"}, answering)
    try:
        with probing(asking, peers[0], tcp.connect(listener._listening[0].address, time.monotonic() + 10)) as probe:
            assert probe.read("peers") == b"one\nother" and (probe.measure().rate or 0) > 0
        with listener.news:
            assert listener.news.wait_for(lambda: listener.probed == {"b-0", "c-0"}, 10)
    finally:
        listener.close()
        answering.links.abort()
        asking.links.abort()
