"""The handshake of a connection: both sides identify and authenticate themselves, or one refuses with a reason.

The opener calls :func:`prove` (only if the run has a secret), then :func:`greet`. The acceptor calls :func:`challenge`
(likewise), then :func:`admit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

from gossipx.errors import (
    ModelMismatchError,
    NotAuthorisedError,
    PeerFaultError,
    ProtocolError,
    StrangerError,
)
from gossipx.protocol.admission import AdmitRequest
from gossipx.protocol.fields import MAX_TEXT
from gossipx.transports import Certified, admissions, checkup
from gossipx.transports.link import Link
from gossipx.wire import (
    Accepted,
    Bytes,
    Challenge,
    CheckupReply,
    CheckupRequest,
    DescribeRequest,
    Hello,
    Message,
    NotAuthorised,
    Open,
    Proof,
    Refused,
    Welcome,
    auth,
    frames,
)
from gossipx.wire.agreement import difference, objection

Visits: TypeAlias = Mapping[str, Callable[[], dict[str, Any]]]
IN_HOSTS_FILE = "its host in the hosts file"


def prove(link: Link, secrets: auth.Secrets, me: Hello, to: str, deadline: float) -> None:
    """Open a connection of a run with a secret: both sides prove that they know one. :func:`greet` follows.

    Raises:
        NotAuthorisedError: one side failed to prove it.
    """
    opener = auth.Opener(secrets.valid(), run=me.peers, name=me.name, to=to, nonce=os.urandom(auth.NONCE_BYTES))
    asked = cast(Challenge, link.request(opener.opened, 0, deadline).message)
    accepted = cast(Accepted, link.request(opener.challenged(asked), 0, deadline).message)
    link.secure(opener.accepted(accepted))


def challenge(link: Link, secrets: auth.Secrets, me: Hello, deadline: float) -> None:
    """Accept a connection of a run with a secret, as counterpart of :func:`prove`. :func:`admit` follows.

    Raises:
        NotAuthorisedError: the opener did not prove that it knows a secret of the run.
        ProtocolError: the opener did not try, or meant another peer.
    """
    opened = _first(link, deadline)
    if isinstance(opened, Hello | CheckupRequest | AdmitRequest):
        raise _turn_away(link, "this run has a secret; give every peer the same --secret-file", deadline)
    if not isinstance(opened, Open):
        raise ProtocolError(f"it began with {type(opened).__name__}, not Open")
    answerer = auth.Answerer(secrets.valid(), os.urandom(auth.NONCE_BYTES))
    link.send(frames.encode(answerer.opened(opened), 0, checks=link.checks), deadline)
    proof = link.receive(deadline).message
    if not isinstance(proof, Proof):
        raise ProtocolError(f"it answered a challenge with {type(proof).__name__}")
    try:
        accepted, session = answerer.proven(proof)
    except NotAuthorisedError:
        raise _turn_away(link, auth.REFUSAL, deadline) from None
    link.send(frames.encode(accepted, 0, checks=link.checks), deadline)
    link.secure(session)
    elsewhere = auth.misdirected(opened, me.name)
    if elsewhere is not None:
        raise refuse(link, elsewhere, deadline)


def _first(link: Link, deadline: float) -> Message:
    try:
        return link.receive(deadline).message
    except frames.VersionError as error:
        raise refuse(link, str(error), deadline) from None


def greet(link: Link, me: Hello, to: int, name: str, manifest: bytes, deadline: float) -> Welcome:
    """Open a connection: introduce this peer as ``me``, and check that peer ``to`` answers.

    Raises:
        ProtocolError: the other side refused, or another peer answered.
        ModelMismatchError: its manifest differs from ours.
    """
    they = cast(Welcome, link.request(me, 0, deadline).message)
    if (they.rank, they.name) != (to, name):
        raise ProtocolError(
            f"at {link.stream.remote} answers {they.name}, rank {they.rank}, not rank {to};"
            " start every peer with the same hosts file"
        )
    if they.model != me.model:
        described = link.request(DescribeRequest(), 0, deadline).payload
        theirs = bytes(described.view) if isinstance(described, Bytes) else b""
        raise ModelMismatchError(
            f"its model differs: {difference(manifest, theirs)}; build the same model on every host"
        )
    link.admitted()
    return they


def admit(
    link: Link,
    me: Hello,
    names: Sequence[str],
    hosts: Sequence[str],
    welcome: Welcome,
    visits: Visits,
    deadline: float,
    admission: admissions.Admission | None = None,
) -> Hello:
    """Accept a connection, as counterpart of :func:`greet`: check the opener, and welcome or refuse it.

    Args:
        names, hosts: names and hosts of the run's peers, by rank.
        welcome: the reply to an opener that is admitted.
        visits: the parts of a checkup, besides the facts, that this peer answers, each with what returns its report.
        admission: decides on peers that are not in the hosts file; None: there can be none.

    Raises:
        StrangerError: the opener is not the peer that it claims to be.
        NotAuthorisedError: the opener uses a secret, and this peer has none.
        ProtocolError: the opener was refused.
    """
    they = _unproven(link, deadline)
    if isinstance(they, AdmitRequest):
        _check_certificate(link, they.name, they.host, "its own address", deadline)
        if (refusal := admissions.answer(link, they, admission, deadline)) is not None:
            raise refuse(link, refusal, deadline)
        they = _first(link, deadline)  # it closes the connection now
    while isinstance(they, CheckupRequest):
        link.send(frames.encode(_visited(me, they.part, visits), 0, checks=link.checks), deadline)
        they = _first(link, deadline)
    if not isinstance(they, Hello):
        raise ProtocolError(f"it began with {type(they).__name__}, not Hello")
    if link.opened is not None and (link.opened.opener, link.opened.run) != (they.name, they.peers):
        raise _turn_away(link, f"it has proven to be {link.opened.opener}, not {they.name}", deadline, StrangerError)
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


def _visited(me: Hello, part: str, visits: Visits) -> CheckupReply:
    if part == "facts":
        return CheckupReply(checkup.facts(me, "run"))
    if part not in visits:
        raise ProtocolError(f"it asked for {part}, which this peer does not answer")
    return CheckupReply(visits[part]())


def visited(link: Link, names: Sequence[str], hosts: Sequence[str], deadline: float) -> CheckupRequest:
    """Accept a connection of ``gossipx doctor`` in a process that is not part of a run; return its first request.

    Args:
        names, hosts: names and hosts of the run's peers, by rank.

    Raises:
        NotAuthorisedError: the opener uses a secret, and this process has none.
        StrangerError: its certificate is for another host.
        ProtocolError: it is not a doctor: a peer of a run, which will retry later.
    """
    first = _unproven(link, deadline)
    if not isinstance(first, CheckupRequest):
        raise ProtocolError(f"it began with {type(first).__name__}, not CheckupRequest")
    if first.name in names:
        _check_certificate(link, first.name, hosts[names.index(first.name)], IN_HOSTS_FILE, deadline)
    link.admitted()
    return first


def _check_certificate(link: Link, name: str, host: str, whose: str, deadline: float) -> None:
    """Turn away an opener whose certificate is for another host; ``whose``: what ``host`` is to it, for the message."""
    if isinstance(link.stream, Certified) and not link.stream.speaks_for(host):
        fault = f"the certificate of {name} is not for '{host}', {whose}"
        raise _turn_away(link, fault, deadline, StrangerError)


def _unproven(link: Link, deadline: float) -> Message:
    """Receive the first frame after authentication; turn away an opener that uses a secret which is not in use here."""
    first = _first(link, deadline)
    if isinstance(first, Open):
        raise _turn_away(link, "this peer has no secret; give every peer the same --secret-file", deadline)
    return first


def _turn_away(
    link: Link, reason: str, deadline: float, kind: type[NotAuthorisedError | StrangerError] = NotAuthorisedError
) -> PeerFaultError:
    """Refuse an opener that has not proven its identity, as :func:`refuse` does; return the error to raise."""
    _close_with(link, NotAuthorised(reason[:MAX_TEXT]), deadline)
    return kind(f"not authorised: {reason}")


def refuse(link: Link, reason: str, deadline: float) -> ProtocolError:
    """Send the reason why the connection will be closed; return the error to raise."""
    _close_with(link, Refused(reason[:MAX_TEXT]), deadline)
    return ProtocolError(reason)


def _close_with(link: Link, last: Message, deadline: float) -> None:
    link.send(frames.encode(last, 0, checks=link.checks), deadline)
    link.read_out(deadline)  # closing with unread bytes may make TCP discard the reason
