"""``gossipx peer join``: a peer that is in nobody's hosts file joins a run under way.

It asks a peer of the run to be admitted, and gets the run's settings, its peers and a rank. Then it starts and follows
one process, as ``gossipx run`` does.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossipx.assembly.devices import check_device
from gossipx.errors import (
    GossipxError,
    NotAuthorisedError,
    PeerFaultError,
    PeerUnreachableError,
    RefusedError,
    StrangerError,
    UsageError,
)
from gossipx.launch import directory as directories
from gossipx.launch.environment import ENV_ADMISSION
from gossipx.launch.hosts import DEFAULT_PORT, PeerLine, address_of, bind_host, only_address, peers_digest, read_hosts
from gossipx.launch.ports import reserve
from gossipx.launch.run.children import Spawn
from gossipx.launch.run.processes import follow
from gossipx.launch.start import Start, check_script
from gossipx.metrics.summary import Summary
from gossipx.peer.admission import Admission
from gossipx.protocol.admission import AdmitReply, AdmitRequest
from gossipx.settings import files
from gossipx.settings.sections import RunConfig
from gossipx.transports import Address, handshake
from gossipx.transports.access import Access, grant
from gossipx.transports.link import Links
from gossipx.wire import Bytes, Hello, auth

ANSWER = 10.0
"""Seconds that a peer has to answer; it needs its role's lock, which is never held for long."""
PATIENCE = 30.0
"""Seconds in which a run that has just lost the peer that admits others, or has no model yet, must admit this one."""
RETRY = 1.0
"""Seconds between two attempts."""
PORTS = 1000
"""Number of ports that are tried, from DEFAULT_PORT on, if none is given."""


def join(
    contacts: str, port: int | None, given: Mapping[str, Any], script: list[str], spawn: Spawn = subprocess.Popen
) -> int:
    """Join the run of the peers ``contacts``, and train until the script ends.

    Args:
        contacts: HOST:PORT of peers of the run, separated by commas; asked in turn.
        port: at which the newcomer listens; None: the first free one from DEFAULT_PORT on.
        given: settings of this machine, by name; None: not given.
        script: a user's script and its arguments; empty: the built-in task.
        spawn: starts the process of the peer.

    Returns:
        The exit code, as ``gossipx run``.

    Raises:
        UsageError: the run takes no newcomers, or the settings are invalid.
        GossipxError: no peer of the run admitted this one.
    """
    check_script(script)
    addresses = [Address(*address_of(one.strip())) for one in contacts.split(",")]
    own = files.resolve(given)
    host = own.exchange.advertise or only_address(own.exchange.bind) or _local_host(addresses[0])
    bind = bind_host(PeerLine(0, host, DEFAULT_PORT, None, host, 0), own.exchange.bind, None)
    access = grant(own.exchange, bind)
    check_device(own.run.device, "--device")
    with _reserved(bind, port) as chosen:
        line = PeerLine(0, host, chosen, None, "", 0)
        request = AdmitRequest(line.shown, host, chosen)
        admission = _Asking(request, access).until_admitted(addresses)
    directory = NewcomerDirectory(admission, own, given)
    named = enumerate(admission.peers())
    peers = [PeerLine(rank, host, port, None, name, 0) for rank, (name, host, port) in named]
    environment = {ENV_ADMISSION: str(directory.admission.resolve())}
    notice = f"{admission.own.name} is peer {admission.rank} of the run {directory.settings.run.name}"
    start = Start(directory.settings, directory, peers, [admission.rank], notice=notice, joins=environment)
    code = follow(start, script, spawn).code
    if directory.summary is not None and directory.summary.retrievals[admission.rank] is not None:
        print(_figures(directory.summary, admission, directory.path))
    return code


def _local_host(contact: Address) -> str:
    """Return the address by which this machine reaches a contact."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(contact.host, contact.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--peers: '{contact.host}' cannot be reached from here ({reason})") from error


@contextlib.contextmanager
def _reserved(bind: str, port: int | None) -> Any:
    """Yield a free port, which is reserved meanwhile."""
    wanted = range(DEFAULT_PORT, DEFAULT_PORT + PORTS) if port is None else [port]
    for one in wanted:
        try:
            found = reserve(Address(bind, one))
        except OSError as error:
            if port is not None:
                raise UsageError(f"--port {port} cannot be used here: {error.strerror}") from error
            continue
        with found:
            yield one
        return
    raise UsageError(f"no port from {wanted[0]} to {wanted[-1]} is free: give --port")


class _Asking:
    """The search for a peer that admits this one.

    Args:
        access: how peers of the run connect.
    """

    def __init__(self, request: AdmitRequest, access: Access):
        self._request = request
        self._access = access
        self._links = Links("newcomer", 0, ANSWER)
        self._reached = False  # whether any peer has answered

    def until_admitted(self, contacts: Sequence[Address]) -> Admission:
        """Ask peers in turn, also those that another one names, until one admits this process."""
        until, reason = time.monotonic() + PATIENCE, ""
        try:
            while True:
                asked = list(contacts)
                for address in asked:
                    try:
                        reply, payload = self._ask(address)
                    except (NotAuthorisedError, StrangerError):
                        raise
                    except PeerFaultError as error:
                        reason = str(error)
                        continue
                    if payload:
                        return Admission.decoded(payload)
                    reason = f"{address}: {reply.later}" if reply.later else reason
                    if reply.elsewhere and (named := Address(*address_of(reply.elsewhere))) not in asked:
                        asked.append(named)
                if not self._reached:
                    raise GossipxError(f"no peer of a run answers at --peers: {reason}")
                if time.monotonic() > until:
                    raise GossipxError(f"no peer has admitted this one within {PATIENCE:g} s: {reason}")
                time.sleep(RETRY)
        finally:
            self._links.abort()

    def _ask(self, address: Address) -> tuple[AdmitReply, bytes]:
        deadline = time.monotonic() + ANSWER
        try:
            link = self._links.add(self._access.transport.connect(address, deadline))
            try:
                me = Hello(0, self._request.name, 1, auth.ANY, "")
                if self._access.secret is not None:
                    handshake.prove(link, self._access.secret, me, auth.ANY, deadline)
                frame = link.request(self._request, 0, deadline)
            except PeerUnreachableError as error:  # the only answer that a peer with TLS has to plain text
                raise PeerUnreachableError(f"{error}: does the run have TLS, or none?") from error
            finally:
                self._links.drop(link)
        except (NotAuthorisedError, StrangerError) as error:
            raise type(error)(f"{address}: {error}") from error
        except RefusedError as error:
            raise UsageError(f"{address}: {error}") from error
        self._reached = True
        assert isinstance(frame.message, AdmitReply)
        return frame.message, bytes(frame.payload.view) if isinstance(frame.payload, Bytes) else b""


class NewcomerDirectory:
    """The directory of the run on this machine, shared with the run's own peers if they are here too.

    It implements :class:`gossipx.launch.start.Directory`. The newcomer's settings have its rank in their name.

    Args:
        own: settings of this machine.
        given: those of them that a user has given, by name.

    Attributes:
        settings: of the newcomer: those of the run, and its own.
        admission: path of the file with the admission.
        summary: the figures of the newcomer; None until it has ended.

    Raises:
        UsageError: the directory belongs to another run, or cannot be written.
    """

    def __init__(self, admission: Admission, own: RunConfig, given: Mapping[str, Any]):
        logdir, rank = Path(own.run.logdir), admission.rank
        self.summary: Summary | None = None
        self._is_new = False  # whether nothing of a peer of this rank was there before
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: self.give_up())
            self.path = self._config = self.admission = logdir  # until the name of the run is known
            self._created: list[Path] = []
            try:
                logdir.mkdir(parents=True, exist_ok=True)
                unnamed = logdir / f".{admission.own.port}.toml"
                self._write(unnamed, admission.settings.encode())
                of_run = files.load(unnamed)
                self.path = logdir / directories.checked_name(str(of_run.get("name", "joined")))
                self._check(admission)
                self._peer = self.path / f"peer-{rank:02d}"
                self._is_new = not self._peer.exists()
                self.path.mkdir(exist_ok=True)
                place = {"name": self.path.name, "logdir": str(logdir)}
                self.settings = files.resolve(of_run, given, place)
                self._config, self.admission = self.path / f"config-{rank}.toml", self.path / f"joined-{rank}.json"
                self._write(self.admission, admission.encoded())
                self._write(self._config, files.dump(self.settings).encode())
                unnamed.unlink()
            except OSError as error:
                raise UsageError(f"cannot write the run: {error.strerror}; give another --logdir", self.path) from error
            undo.pop_all()

    def _write(self, file: Path, content: bytes) -> None:
        self._created.append(file)
        directories.replace(file, content)

    def _check(self, admission: Admission) -> None:
        """Check that a directory of that name, if there is one, is of the same run."""
        hosts = self.path / directories.HOSTS_FILE
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        begun = [PeerLine(rank, host, port, None, name, 0) for rank, (name, host, port) in enumerate(admission.begun)]
        if hosts.is_file():
            same = peers_digest(read_hosts(hosts)) == peers_digest(begun)
        else:
            before = [Admission.decoded(one.read_bytes()).begun for one in self.path.glob("joined-*.json")]
            same = admission.begun in before
        if not same:
            raise UsageError(
                f"it is of another run named '{self.path.name}': give --logdir DIR, in which no run has that name",
                self.path,
            )

    @property
    def config(self) -> Path:
        """Return the path of the settings file."""
        return self._config

    def record(self, settings: RunConfig) -> None:
        """Replace the settings file."""
        directories.record(self._config, settings)

    def keep(self) -> None:
        """Keep the files, as the newcomer trains."""
        self._created.clear()

    def give_up(self) -> None:
        """Remove the files, as nothing was trained."""
        for file in self._created:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        if self._is_new:
            shutil.rmtree(self._peer, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty
            self.path.rmdir()

    def release(self) -> None:
        """Do nothing: the directory is not locked."""

    def conclude(self, summary: Summary) -> bool:
        """Keep the figures; the summary of the run is written by the machines that began it."""
        self.summary = summary
        return False


def _figures(summary: Summary, admission: Admission, path: Path) -> str:
    """Return the figures of the newcomer in one line."""
    place = admission.rank
    accuracy = summary.test_accuracy[place]
    shown = "" if accuracy is None else f", test accuracy {accuracy:.3f}"
    agreed = {True: ", all peers hold one model", False: ", peers hold different models", None: ""}[summary.agreed]
    done = f"{summary.iterations} iterations, {summary.retrievals[place]} retrievals"
    what = f"peer {place} ({admission.own.name}): {done}{shown}"
    return f"{what}{agreed}; wrote {path / f'peer-{place:02d}'}"
