"""The figures of a peer for Prometheus."""

from __future__ import annotations

import socket
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

import pytest

from gossipx.errors import UsageError
from gossipx.metrics import prometheus

pytest.importorskip("prometheus_client", reason="figures are served by the package prometheus-client")

STATUS: dict[str, Any] = {"stage": "train", "iteration": 120, "retrievals": 12, "loss": 0.5, "accuracy": None}
STATUS |= {"waiting": False, "suspects": [1, 3], "lost": [], "bytes_received": 1000}


def test_an_address_is_on_loopback_unless_it_says_otherwise() -> None:
    found = [prometheus.address_from(given) for given in ("9400", "0.0.0.0:9400", "[::1]:9400")]
    assert found == [("127.0.0.1", 9400), ("0.0.0.0", 9400), ("::1", 9400)]
    for given in ("", "port", "0", "65536", "somewhere:9400", "1.2.3.4:"):
        with pytest.raises(UsageError, match="--metrics-port"):
            prometheus.address_from(given)


def test_without_the_package_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"pip install '\.\[metrics\]'"):
        prometheus.address_from("9400")


def served(figures: Mapping[str, Any]) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    exporter = prometheus.Exporter("127.0.0.1", port, "mine", "a", lambda: figures)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    finally:
        exporter.close()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, "closed"


def test_figures_have_the_names_of_run_and_peer() -> None:
    """Counts of lists are their lengths; a figure without a value is left out."""
    assert served(STATUS) == [
        'gossipx_retrievals_total{peer="a",run="mine"} 12.0',
        'gossipx_iterations_total{peer="a",run="mine"} 120.0',
        'gossipx_received_bytes_total{peer="a",run="mine"} 1000.0',
        'gossipx_loss{peer="a",run="mine"} 0.5',
        'gossipx_waiting{peer="a",run="mine"} 0.0',
        'gossipx_peers_suspected{peer="a",run="mine"} 2.0',
        'gossipx_peers_lost{peer="a",run="mine"} 0.0',
        'gossipx_stage{peer="a",run="mine",stage="train"} 1.0',
    ]


def test_a_port_in_use_is_refused_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"a cannot listen at 127\.0\.0\.1:{port} \(Address already in use\)"):
            prometheus.Exporter("127.0.0.1", port, "mine", "a", lambda: STATUS)
