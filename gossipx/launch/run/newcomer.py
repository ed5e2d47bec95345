"""``gossipx peer join``: a peer that is in nobody's hosts file joins a run under way.

It asks a peer of the run to be admitted, and gets the run's settings, its peers and a rank. Then it starts and follows
one process, as ``gossipx run`` does.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossipx import errors
from gossipx.assembly.devices import check_device
from gossipx.launch.directory.joined import NewcomerDirectory
from gossipx.launch.environment import ENV_ADMISSION
from gossipx.launch.hosts import DEFAULT_PORT, PeerLine, address_of, bind_host, only_address
from gossipx.launch.ports import reserve
from gossipx.launch.run.children import Spawn
from gossipx.launch.run.processes import follow
from gossipx.launch.start import Start, check_script
from gossipx.metrics.summary import Summary
from gossipx.peer.joining.admission import Admission
from gossipx.settings import files
from gossipx.transports import Address, handshake
from gossipx.transports.access import Access, grant
from gossipx.transports.link import Links
from gossipx.wire import AdmitReply, AdmitRequest, Bytes, Hello, auth

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
    start = Start(
        settings=directory.settings,
        peers=peers,
        here=[admission.rank],
        notice=notice,
        directory=directory,
        joins=environment,
    )
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
        raise errors.UsageError(f"--peers: '{contact.host}' cannot be reached from here ({reason})") from error


@contextlib.contextmanager
def _reserved(bind: str, port: int | None) -> Any:
    """Yield a free port, which is reserved meanwhile."""
    wanted = range(DEFAULT_PORT, DEFAULT_PORT + PORTS) if port is None else [port]
    for one in wanted:
        try:
            found = reserve(Address(bind, one))
        except OSError as error:
            if port is not None:
                raise errors.UsageError(f"--port {port} cannot be used here: {error.strerror}") from error
            continue
        with found:
            yield one
        return
    raise errors.UsageError(f"no port from {wanted[0]} to {wanted[-1]} is free: give --port")


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
                    except (errors.NotAuthorisedError, errors.StrangerError):
                        raise
                    except errors.PeerFaultError as error:
                        reason = str(error)
                        continue
                    if payload:
                        return Admission.decoded(payload)
                    reason = f"{address}: {reply.later}" if reply.later else reason
                    if reply.elsewhere and (named := Address(*address_of(reply.elsewhere))) not in asked:
                        asked.append(named)
                if not self._reached:
                    raise errors.GossipxError(f"no peer of a run answers at --peers: {reason}")
                if time.monotonic() > until:
                    raise errors.GossipxError(f"no peer has admitted this one within {PATIENCE:g} s: {reason}")
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
            except errors.PeerUnreachableError as error:  # the only answer that a peer with TLS has to plain text
                raise errors.PeerUnreachableError(f"{error}: does the run have TLS, or none?") from error
            finally:
                self._links.drop(link)
        except (errors.NotAuthorisedError, errors.StrangerError) as error:
            raise type(error)(f"{address}: {error}") from error
        except errors.RefusedError as error:
            raise errors.UsageError(f"{address}: {error}") from error
        self._reached = True
        assert isinstance(frame.message, AdmitReply)
        return frame.message, bytes(frame.payload.view) if isinstance(frame.payload, Bytes) else b""


def _figures(summary: Summary, admission: Admission, path: Path) -> str:
    """Return the figures of the newcomer in one line."""
    place = admission.rank
    accuracy = summary.test_accuracy[place]
    shown = "" if accuracy is None else f", test accuracy {accuracy:.3f}"
    agreed = {True: ", all peers hold one model", False: ", peers hold different models", None: ""}[summary.agreed]
    done = f"{summary.iterations} iterations, {summary.retrievals[place]} retrievals"
    what = f"peer {place} ({admission.own.name}): {done}{shown}"
    return f"{what}{agreed}; wrote {path / f'peer-{place:02d}'}"
