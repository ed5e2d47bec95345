"""``gossipx doctor``: looks at the machines of a run before it, or while, it does not do what it should.

The same command is started on each host, as ``gossipx run`` is. Each listens where its peers would, visits all others,
measures with each, and learns what they have found; so each tells of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from gossipx import access
from gossipx.errors import GossipxError, UsageError
from gossipx.launch.children import script_exists
from gossipx.launch.doctor import machine
from gossipx.launch.doctor.findings import MOST_MANIFEST, Facts, Host, Name, Row, hosts_of, merge
from gossipx.launch.doctor.rounds import Rounds
from gossipx.launch.doctor.rules import Case, Verdict, exit_code, verdicts
from gossipx.launch.doctor.visit import Guest, fit
from gossipx.launch.hosts import PeerLine, bind_host, peers_digest, read_hosts
from gossipx.settings import RunConfig
from gossipx.transports import checkup, unix
from gossipx.transports.links import Links
from gossipx.wire import Hello, frames

__all__ = ["Report", "examine"]

_TIMEOUT = 10.0
"""Seconds within which a frame that has begun must be whole."""


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        case: all findings.
        verdicts: what is to be said of them.
    """

    case: Case
    verdicts: list[Verdict]

    @property
    def exit_code(self) -> int:
        """0: all is well; 1: some verdict fails; 5: somebody is not authorised."""
        return exit_code(self.verdicts)


def examine(
    settings: RunConfig,
    peers_file: Path,
    script: list[str] | None,
    wait: float,
    tell: Callable[[str], None],
) -> Report:
    """Look at this machine's part of the hosts file and, with the doctors of the others, at all of it.

    Args:
        settings: as of a run, presets not yet filled in.
        peers_file: the hosts file.
        script: whose model is looked at, with its arguments; empty: the built-in task's; None: none is.
        wait: seconds that other hosts are waited for.
        tell: told now and then what goes on.

    Raises:
        UsageError: settings or hosts file are not right, as ``gossipx run`` would say.
    """
    peers = read_hosts(peers_file)
    hosts = hosts_of(peers)
    names = machine.look_up(hosts)
    here = _here(hosts, names, settings.exchange.advertise, peers_file)
    binds = {peer.rank: bind_host(peer, settings.exchange.bind, peers_file) for host in here for peer in host.peers}
    granted = access.grant(settings.exchange, next(iter(binds.values())))
    with _ended_by_sigterm():
        model = None if script is None else _model(settings, peers, peers_file, here[0], script)
    links = Links("doctor", 0, _TIMEOUT)
    doctors: list[Rounds] = []
    try:
        for host in here:
            me = Hello(
                host.peers[0].rank, host.peers[0].name, len(peers), peers_digest(peers), model.digest if model else ""
            )
            guest = Guest(me, peers, granted, links)
            row = _row(host, names, settings.run.device, model)
            listens = [binds[peer.rank] for peer in host.peers]
            doctors.append(Rounds(host, hosts, guest, settings.exchange, listens, row, wait, _Waiting(tell)))
        with _ended_by_sigterm():
            _run(doctors)
    finally:
        for doctor in doctors:
            doctor.close()
        links.abort()
    rows: dict[int, Row] = {}
    for doctor in doctors:
        rows = merge(rows, doctor.rows.values())
    case = Case(hosts, rows, tls=settings.exchange.tls_cert is not None)
    return Report(case, verdicts(case))


def _run(doctors: Sequence[Rounds]) -> None:
    """All hosts of this machine at once; the first error of one is raised."""
    failed: list[BaseException] = []

    def go(doctor: Rounds) -> None:
        try:
            doctor.go()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=go, args=(doctor,), name="gossipx-doctor", daemon=True) for doctor in doctors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class _Waiting:
    """Tells who is waited for, when that changes."""

    def __init__(self, tell: Callable[[str], None]):
        self._tell = tell
        self._told: dict[int, list[int]] = {}

    def __call__(self, host: Host, missing: list[Host]) -> None:
        numbers = [one.number for one in missing]
        if missing and self._told.get(host.number) != numbers:
            names = ", ".join(one.name for one in missing)
            self._tell(f"{host.name} waits for {names}: start the same command there")
        self._told[host.number] = numbers


# --- this machine -------------------------------------------------------------------------------------


def _here(hosts: Sequence[Host], names: Sequence[Name], advertise: str | None, file: Path) -> list[Host]:
    """Which hosts are this machine; unlike a run, it goes on if another one's name does not resolve."""
    if advertise is not None:
        here = [host for host in hosts if host.name == advertise.strip("[]")]
        if not here:
            raise UsageError(f"no line has the host '{advertise}' that --advertise names", file)
        return here
    addresses = {name.host: name.addresses for name in names}
    here = [host for host in hosts if any(map(machine.is_here, addresses[host.number]))]
    if not here:
        unknown = next((name for name in names if not name.addresses), None)
        why = f" ({hosts[unknown.host].name} does not resolve: {unknown.error})" if unknown else ""
        raise UsageError(f"no line is this machine{why}: add one, or say which by --advertise HOST", file)
    return here


@dataclass(frozen=True)
class _Model:
    """``what`` it is in words, its ``manifest`` and the ``digest`` of that; or the ``fault`` by which there is none."""

    what: str
    manifest: str = ""
    digest: str = ""
    fault: str = ""


def _model(settings: RunConfig, peers: Sequence[PeerLine], file: Path, host: Host, script: list[str]) -> _Model:
    from gossipx.build.settings import effective_config
    from gossipx.launch.doctor.model import manifest

    complete = effective_config(settings, len(peers), bool(script))
    complete = replace(complete, exchange=access.absolute(complete.exchange))
    first = host.peers[0]
    what = script[0] if script else f"{complete.task.model} for {complete.task.task}"
    if not script_exists(script):
        raise UsageError("no such script", file=script[0])
    try:
        described = manifest(complete, file, first.rank, first.device or settings.run.device, script)
    except GossipxError as error:
        return _Model(what, fault=fit(str(error)))
    return _Model(what, described, hashlib.sha256(described.encode()).hexdigest())


def _row(host: Host, names: Sequence[Name], device: str, model: _Model | None) -> Row:
    versions = checkup.versions()
    devices, accelerators, driver = machine.devices(host, device)
    return Row(
        host=host.number,
        began=time.time(),
        version=0,
        facts=Facts(
            role="doctor",
            **versions,
            protocol=frames.VERSION,
            machine=unix.machine(),
            model=model.digest if model else "",
        ),
        manifest=model.manifest if model and len(model.manifest) <= MOST_MANIFEST else "",
        model=model.what if model else "",
        fault=model.fault if model else "",
        names=tuple(names),
        devices=devices,
        accelerators=accelerators,
        driver=driver,
    )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that no process of its own is left."""

    def ended(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
