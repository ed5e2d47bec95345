"""The handshake of a connection: both sides identify and authenticate themselves, or one refuses with a reason.

The opener calls :func:`prove` (only if the run has a secret), then :func:`greet`. The acceptor calls :func:`challenge`
(likewise), then :func:`admit`.

Three kinds of openers are answered before or instead of a peer. A process that wants to join asks by AdmitRequest, on a
connection of its own; whether the run takes it is decided by the role. Once it is admitted it opens connections like
any peer, and its Hello says that it joined. ``gossipx doctor`` and ``gossipx status`` ask by CheckupRequest; a doctor
and a peer of a run report the same facts, so that one can examine the other. All others are turned away, and
:class:`Trust` records it: from failed authentications a peer decides whether it is itself the one that does not belong
to the run.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, Protocol, TypeAlias, cast

from gossipx import errors, wire
from gossipx.figures import Counters
from gossipx.memory import Source
from gossipx.protocol.fields import MAX_TEXT, JoinedPeer
from gossipx.transports import Certified
from gossipx.transports.link import Link
from gossipx.wire import auth, frames
from gossipx.wire.agreement import difference, objection


class JoinDecider(Protocol):
    """Decides on newcomers; :class:`gossipx.runtime.driver.joins.JoinHandler`."""

    def admit(self, request: wire.AdmitRequest, opener: str) -> tuple[wire.AdmitReply, bytes] | str:
        """Return the reply to a process on host ``opener`` that asks to join, and its payload; or, in one line, why it
        cannot join.
        """

    def meet(self, peer: JoinedPeer) -> str | None:
        """Add a peer that joined; return in one line why it is not a member, None if it is."""


def answer_newcomer(
    link: Link, request: wire.AdmitRequest, admission: JoinDecider | None, deadline: float
) -> str | None:
    """Answer a process that asks to join; return why it cannot, None if it was answered."""
    opener = link.stream.remote.rpartition(":")[0]
    decided = "this process takes no newcomers" if admission is None else admission.admit(request, opener)
    if isinstance(decided, str):
        return decided
    reply, payload = decided
    source = Source(memoryview(payload)) if payload else None
    link.send(frames.encode(reply, 0, source, link.checks), deadline)
    return None


def checkup_facts(me: wire.Hello, role: str) -> dict[str, Any]:
    """Return the facts of this process. ``role`` is "run" or "doctor"; hosts file and model are given as digests."""
    own = {"name": me.name, "role": role, "peers": me.peers, "size": me.size, "model": me.model}
    return {**own, "protocol": frames.VERSION, **_versions(), "clock": time.time()}


def facts_in(report: Mapping[str, object]) -> dict[str, Any]:
    """Return the facts in a report; ProtocolError if one is missing."""
    wanted = checkup_facts(wire.Hello(0, "", 1, "", ""), "")
    for name, example in wanted.items():
        if type(report.get(name)) is not type(example):
            raise errors.ProtocolError(f"its report has no {name}")
    return {name: report[name] for name in wanted}


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("gossipx", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


log = logging.getLogger("gossipx")

# Seconds between two log lines about strangers; those in between are only counted.
_LOG_EVERY = 60.0
# Share of peer_timeout after which a peer that some have turned away, and none has admitted, stops waiting for the
# rest. Others may start a little later; but after the whole of peer_timeout this peer would begin to train alone.
_PATIENCE = 0.5


class Trust:
    """Records failed and successful authentications, as seen by one peer; thread-safe.

    Args:
        others: number of other peers in the run.
        peer_timeout: seconds after which a peer begins without those that it has not found.
        counts: get the number of strangers.
    """

    def __init__(self, others: int, peer_timeout: float, counts: Counters):
        self._others = others
        self._gives_up_at = time.monotonic() + _PATIENCE * peer_timeout
        self._lock = threading.Lock()
        self._counts = counts
        self._logged = (-math.inf, 0)  # time of the last log line about strangers, and their number then
        self._is_admitted = False
        self._at_odds: set[int] = set()  # ranks of peers that turned this one away or were turned away by it
        self._doubt: errors.NotAuthorisedError | errors.RefusedError | None = None

    @property
    def is_outcast(self) -> bool:
        """Whether this peer itself seems not to belong to the run.

        That is so if all others turn it away, or if some do and none has admitted it for half of peer_timeout. Once one
        has admitted it, the peers that turn it away are taken for the strangers.
        """
        with self._lock:
            everybody = len(self._at_odds) == self._others
            late = time.monotonic() > self._gives_up_at
            return not self._is_admitted and bool(self._at_odds) and (everybody or late)

    @property
    def doubt(self) -> errors.NotAuthorisedError | errors.RefusedError | None:
        """The reason why no peer has admitted this one, if an authentication failure is known.

        The failure may be a stranger's that connected here, which anyone can cause. So this alone ends nothing; it only
        explains why a peer has found no others.
        """
        with self._lock:
            return None if self._is_admitted else self._doubt

    def record_admission(self) -> None:
        """Record that this peer and another one have admitted each other."""
        with self._lock:
            self._is_admitted = True

    def record_rejection(self, rank: int, error: errors.NotAuthorisedError | errors.RefusedError) -> None:
        """Record that this peer was turned away by, or has turned away, the peer of this rank."""
        with self._lock:
            self._doubt = error
            self._at_odds.add(rank)

    def record_stranger(self, remote: str, error: errors.NotAuthorisedError | errors.StrangerError) -> None:
        """Record that an inbound connection was turned away; log it at a limited rate."""
        with self._lock:
            self._counts.add("strangers")
            strangers = self._counts["strangers"]
            if isinstance(error, errors.NotAuthorisedError):
                self._doubt = self._doubt or error
            now = time.monotonic()
            when, before = self._logged
            if now - when < _LOG_EVERY:
                return
            self._logged = now, strangers
            more = strangers - before - 1
        log.warning("a connection from %s: %s%s", remote, error, f" ({more} more turned away before)" if more else "")


Queries: TypeAlias = Mapping[str, Callable[[], dict[str, Any]]]
IN_HOSTS_FILE = "its host in the hosts file"


def prove(link: Link, secrets: auth.Secrets, me: wire.Hello, to: str, deadline: float) -> None:
    """Open a connection of a run with a secret: both sides prove that they know one. :func:`greet` follows.

    Raises:
        NotAuthorisedError: one side failed to prove it.
    """
    opener = auth.Opener(secrets.valid(), run=me.peers, name=me.name, to=to, nonce=os.urandom(auth.NONCE_BYTES))
    asked = cast(wire.Challenge, link.request(opener.opened, 0, deadline).message)
    accepted = cast(wire.Accepted, link.request(opener.challenged(asked), 0, deadline).message)
    link.secure(opener.accepted(accepted))


def challenge(link: Link, secrets: auth.Secrets, me: wire.Hello, deadline: float) -> None:
    """Accept a connection of a run with a secret, as counterpart of :func:`prove`. :func:`admit` follows.

    Raises:
        NotAuthorisedError: the opener did not prove that it knows a secret of the run.
        ProtocolError: the opener did not try, or meant another peer.
    """
    opened = _first(link, deadline)
    if isinstance(opened, wire.Hello | wire.CheckupRequest | wire.AdmitRequest):
        raise _turn_away(link, "this run has a secret; give every peer the same --secret-file", deadline)
    if not isinstance(opened, wire.Open):
        raise errors.ProtocolError(f"it began with {type(opened).__name__}, not Open")
    answerer = auth.Answerer(secrets.valid(), os.urandom(auth.NONCE_BYTES))
    link.send(frames.encode(answerer.opened(opened), 0, checks=link.checks), deadline)
    proof = link.receive(deadline).message
    if not isinstance(proof, wire.Proof):
        raise errors.ProtocolError(f"it answered a challenge with {type(proof).__name__}")
    try:
        accepted, session = answerer.proven(proof)
    except errors.NotAuthorisedError:
        raise _turn_away(link, auth.REFUSAL, deadline) from None
    link.send(frames.encode(accepted, 0, checks=link.checks), deadline)
    link.secure(session)
    elsewhere = auth.misdirected(opened, me.name)
    if elsewhere is not None:
        raise refuse(link, elsewhere, deadline)


def _first(link: Link, deadline: float) -> wire.Message:
    try:
        return link.receive(deadline).message
    except frames.VersionError as error:
        raise refuse(link, str(error), deadline) from None


def greet(link: Link, me: wire.Hello, to: int, name: str, manifest: bytes, deadline: float) -> wire.Welcome:
    """Open a connection: introduce this peer as ``me``, and check that peer ``to`` answers.

    Raises:
        ProtocolError: the other side refused, or another peer answered.
        ModelMismatchError: its manifest differs from ours.
    """
    they = cast(wire.Welcome, link.request(me, 0, deadline).message)
    if (they.rank, they.name) != (to, name):
        raise errors.ProtocolError(
            f"at {link.stream.remote} answers {they.name}, rank {they.rank}, not rank {to};"
            " start every peer with the same hosts file"
        )
    if they.model != me.model:
        described = link.request(wire.DescribeRequest(), 0, deadline).payload
        theirs = bytes(described.view) if isinstance(described, wire.Bytes) else b""
        raise errors.ModelMismatchError(
            f"its model differs: {difference(manifest, theirs)}; build the same model on every host"
        )
    link.admitted()
    return they


def admit(
    link: Link,
    me: wire.Hello,
    names: Sequence[str],
    hosts: Sequence[str],
    welcome: wire.Welcome,
    queries: Queries,
    deadline: float,
    admission: JoinDecider | None = None,
) -> wire.Hello:
    """Accept a connection, as counterpart of :func:`greet`: check the opener, and welcome or refuse it.

    Args:
        names, hosts: names and hosts of the run's peers, by rank.
        welcome: the reply to an opener that is admitted.
        queries: the parts of a checkup, besides the facts, that this peer answers, each with what returns its report.
        admission: decides on peers that are not in the hosts file; None: there can be none.

    Raises:
        StrangerError: the opener is not the peer that it claims to be.
        NotAuthorisedError: the opener uses a secret, and this peer has none.
        ProtocolError: the opener was refused.
    """
    they = _unproven(link, deadline)
    if isinstance(they, wire.AdmitRequest):
        _check_certificate(link, they.name, they.host, "its own address", deadline)
        if (refusal := answer_newcomer(link, they, admission, deadline)) is not None:
            raise refuse(link, refusal, deadline)
        they = _first(link, deadline)  # it closes the connection now
    while isinstance(they, wire.CheckupRequest):
        link.send(frames.encode(_answer_to_query(me, they.part, queries), 0, checks=link.checks), deadline)
        they = _first(link, deadline)
    if not isinstance(they, wire.Hello):
        raise errors.ProtocolError(f"it began with {type(they).__name__}, not Hello")
    if link.opened is not None and (link.opened.opener, link.opened.run) != (they.name, they.peers):
        raise _turn_away(
            link, f"it has proven to be {link.opened.opener}, not {they.name}", deadline, errors.StrangerError
        )
    reason = objection(me, they, names)
    if reason is None and they.joined and they.model == me.model:  # with another model it may only ask for ours
        reason = "no peer can join this run" if admission is None else admission.meet(they.joined[0])
    if reason is not None:
        raise refuse(link, reason, deadline)
    if they.joined:
        _check_certificate(link, they.name, they.joined[0].host, "its own address", deadline)
    else:
        _check_certificate(link, they.name, hosts[they.rank], IN_HOSTS_FILE, deadline)
    link.send(frames.encode(welcome, 0, checks=link.checks), deadline)
    link.admitted()
    return they


def _answer_to_query(me: wire.Hello, part: str, queries: Queries) -> wire.CheckupReply:
    if part == "facts":
        return wire.CheckupReply(checkup_facts(me, "run"))
    if part not in queries:
        raise errors.ProtocolError(f"it asked for {part}, which this peer does not answer")
    return wire.CheckupReply(queries[part]())


def receive_query(link: Link, names: Sequence[str], hosts: Sequence[str], deadline: float) -> wire.CheckupRequest:
    """Accept a connection of ``gossipx doctor`` in a process that is not part of a run; return its first request.

    Args:
        names, hosts: names and hosts of the run's peers, by rank.

    Raises:
        NotAuthorisedError: the opener uses a secret, and this process has none.
        StrangerError: its certificate is for another host.
        ProtocolError: it is not a doctor: a peer of a run, which will retry later.
    """
    first = _unproven(link, deadline)
    if not isinstance(first, wire.CheckupRequest):
        raise errors.ProtocolError(f"it began with {type(first).__name__}, not CheckupRequest")
    if first.name in names:
        _check_certificate(link, first.name, hosts[names.index(first.name)], IN_HOSTS_FILE, deadline)
    link.admitted()
    return first


def _check_certificate(link: Link, name: str, host: str, whose: str, deadline: float) -> None:
    """Turn away an opener whose certificate is for another host; ``whose``: what ``host`` is to it, for the message."""
    if isinstance(link.stream, Certified) and not link.stream.speaks_for(host):
        fault = f"the certificate of {name} is not for '{host}', {whose}"
        raise _turn_away(link, fault, deadline, errors.StrangerError)


def _unproven(link: Link, deadline: float) -> wire.Message:
    """Receive the first frame after authentication; turn away an opener that uses a secret which is not in use here."""
    first = _first(link, deadline)
    if isinstance(first, wire.Open):
        raise _turn_away(link, "this peer has no secret; give every peer the same --secret-file", deadline)
    return first


def _turn_away(
    link: Link,
    reason: str,
    deadline: float,
    kind: type[errors.NotAuthorisedError | errors.StrangerError] = errors.NotAuthorisedError,
) -> errors.PeerFaultError:
    """Refuse an opener that has not proven its identity, as :func:`refuse` does; return the error to raise."""
    _close_with(link, wire.NotAuthorised(reason[:MAX_TEXT]), deadline)
    return kind(f"not authorised: {reason}")


def refuse(link: Link, reason: str, deadline: float) -> errors.ProtocolError:
    """Send the reason why the connection will be closed; return the error to raise."""
    _close_with(link, wire.Refused(reason[:MAX_TEXT]), deadline)
    return errors.ProtocolError(reason)


def _close_with(link: Link, last: wire.Message, deadline: float) -> None:
    link.send(frames.encode(last, 0, checks=link.checks), deadline)
    link.read_out(deadline)  # closing with unread bytes may make TCP discard the reason
