"""The figures of a running peer for Prometheus: ``--metrics-port``.

Each peer serves its own, so that they are there as long as the peer is, also without ``gossipx run``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gossipx.errors import UsageError, how_to_install
from gossipx.figures import FIGURES


def address_from(text: str) -> tuple[str, int]:
    """Return the address of ``[HOST:]PORT``; without a host it is on loopback.

    Raises:
        UsageError: it is something else, or prometheus-client is not installed.
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        raise UsageError(f"--metrics-port {text}: give a port, or an address and a port as in 0.0.0.0:9400") from None
    if not 1 <= number <= 65535:
        raise UsageError(f"--metrics-port {text}: a port is a number from 1 to 65535")
    _library()
    return host, number


def own_address(given: str, rank: int) -> tuple[str, int]:
    """Return where a peer serves its figures: the peers of one machine cannot share a port.

    Raises:
        UsageError: as :func:`address_from`, or the port of this rank is too high.
    """
    host, port = address_from(given)
    if port + rank > 65535:
        raise UsageError(f"--metrics-port {given}: the port of rank {rank} would be above 65535; give a lower one")
    return host, port + rank


def _library() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise UsageError(f"--metrics-port needs prometheus-client: {how_to_install('metrics')}") from error
    return prometheus_client


class Exporter:
    """A web server with one peer's figures.

    Args:
        host, port: where it listens.
        run, peer: names of the run and the peer, as labels of each figure.
        status: returns the peer's figures, as :func:`gossipx.runtime.figures.reporting.inspect`; called on
            the server's threads.

    Raises:
        UsageError: the port is not available.
    """

    def __init__(self, host: str, port: int, run: str, peer: str, status: Callable[[], Mapping[str, Any]]):
        self._prometheus = library = _library()
        self._labels = {"run": run, "peer": peer}
        self._status = status
        registry = library.CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = library.start_http_server(port, host, registry)
        except OSError as error:
            raise UsageError(
                f"--metrics-port: {peer} cannot listen at {host}:{port} ({error.strerror}); its port is the given one"
                " plus its rank: give another port"
            ) from error

    def describe(self) -> list[Any]:
        """Return nothing: the registry would otherwise collect the figures when it is made."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; called by the registry for each request."""
        core, figures = self._prometheus.core, self._status()
        for figure in FIGURES:
            value, name = figures.get(figure.name), figure.where.prometheus
            if name and value is not None:
                family = core.GaugeMetricFamily if figure.where.gauge else core.CounterMetricFamily
                text = f"{figure.help[0].upper()}{figure.help[1:]}."
                yield self._sample(family, name, text, len(value) if isinstance(value, list) else value)
        yield self._sample(core.GaugeMetricFamily, "stage", "The stage that the peer is in.", 1, stage=figures["stage"])

    def _sample(self, family: Any, name: str, text: str, value: float, **labels: str) -> Any:
        labels = {**self._labels, **labels}
        made = family(f"gossipx_{name}", text, labels=list(labels))
        made.add_metric(list(labels.values()), value)
        return made

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
