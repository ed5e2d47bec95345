"""Requests to running peers from outside their run: for their status, or to leave.

They use the ports of the hosts file and authenticate as a peer does. The requester is not a member of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from gossipx import errors
from gossipx.launch.hosts import PeerLine, peers_digest
from gossipx.peer.status import Status
from gossipx.protocol.places import fault
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools.doctor.probe import CONNECT, ProbeSettings, connect_to_line, probing
from gossipx.transports.access import grant
from gossipx.transports.link import Links
from gossipx.wire import CheckupPart, Hello

RANKS = ("exchanges_with", "waits_for", "suspects", "lost", "left")
"""Fields of a status that are lists of ranks; ``last_exchange`` is one rank or None."""
_AT_ONCE = 32  # peers that are asked at the same time


@dataclass(frozen=True)
class PeerAnswer:
    """The answer of one peer.

    Attributes:
        peer: its line of the hosts file.
        report: the answer by name; empty: it did not answer.
        why: why it did not answer.
        authorised: whether it did not turn the asker away.
    """

    peer: PeerLine
    report: dict[str, Any]
    why: str = ""
    authorised: bool = True


def query(
    peers: Sequence[PeerLine], exchange: ExchangeSettings, part: CheckupPart, only: Sequence[PeerLine]
) -> list[PeerAnswer]:
    """Ask peers of a run, several at a time, each within a few seconds.

    Args:
        peers: all peers of the run, by rank.
        exchange: has the secret or the certificates of the run.
        part: "status" or "drain"; see :class:`gossipx.wire.CheckupRequest`.
        only: the peers to ask.

    Raises:
        UsageError: the secret or the certificates cannot be used.
    """
    granted = grant(exchange, "127.0.0.1")  # the requester does not listen
    links = Links("asker", 0, timeout=CONNECT)
    digest = peers_digest(peers)

    def ask(to: PeerLine) -> PeerAnswer:
        me = Hello(to.rank, to.name, len(peers), digest, "")
        probes = ProbeSettings(me=me, peers=peers, access=granted, links=links)
        try:
            with probing(probes, to, connect_to_line(probes, to)) as probe:
                facts = probe.facts
                if facts["role"] != "run":
                    return PeerAnswer(to, {}, "a doctor answers there")
                if (facts["peers"], facts["size"], facts["name"]) != (digest, len(peers), to.name):
                    return PeerAnswer(to, {}, f"a peer of another run answers there: {errors.printable(facts['name'])}")
                report = probe.report(part)
                if part == "status" and report:
                    msgspec.convert(report, Status)
                return PeerAnswer(to, report)
        except msgspec.ValidationError:
            return PeerAnswer(to, {}, "its status cannot be read: it may be of another version")
        except (errors.NotAuthorisedError, errors.StrangerError) as error:
            return PeerAnswer(to, {}, errors.printable(str(error)), authorised=False)
        except errors.PeerTimeoutError:
            return PeerAnswer(to, {}, f"no answer within {CONNECT:g} s{_if_hidden(to)}")
        except errors.ConnectionClosedError:
            return PeerAnswer(
                to, {}, "closes the connection: it may need --secret-file or --tls-cert, --tls-key, --tls-ca"
            )
        except errors.PeerUnreachableError as error:
            return PeerAnswer(
                to, {}, f"not running ({errors.printable(str(error).rpartition(': ')[2])}){_if_hidden(to)}"
            )
        except errors.GossipxError as error:
            return PeerAnswer(to, {}, errors.printable(str(error)))

    with contextlib.ExitStack() as stack:
        stack.callback(links.abort)
        pool = stack.enter_context(ThreadPoolExecutor(min(_AT_ONCE, len(only))))
        return list(pool.map(ask, only))


def _if_hidden(peer: PeerLine) -> str:
    return "; it is behind NAT: ask on its own host" if peer.behind_nat else ""


def statuses(peers: Sequence[PeerLine], exchange: ExchangeSettings) -> list[PeerAnswer]:
    """Ask all peers of a run for their status, also those that joined it while it was in progress.

    Args:
        peers: the peers of the hosts file, by rank.
        exchange: has the secret or the certificates of the run.

    Returns:
        The answers, with names of peers in place of ranks.

    Raises:
        UsageError: the secret or the certificates cannot be used.
    """
    found = query(peers, exchange, "status", peers)
    if newcomers := _newcomers(found, peers):
        found += query(peers, exchange, "status", newcomers)
    names = {peer.rank: peer.name for peer in (*peers, *newcomers)}
    return [dataclasses.replace(one, report=_named(one.report, names)) for one in found]


def _newcomers(found: Sequence[PeerAnswer], peers: Sequence[PeerLine]) -> list[PeerLine]:
    """Return the peers that joined the run, as the others know them, by rank."""
    joined: dict[int, PeerLine] = {}
    for told in (text for one in found for text in one.report.get("joined", ())):
        with contextlib.suppress(ValueError):  # it is another process's word
            rank, port, host, name = str(told).split(" ", 3)
            if not fault(host, int(port), name):
                joined[int(rank)] = PeerLine(int(rank), host, int(port), None, name, line=0)
    return [joined[rank] for rank in sorted(joined) if rank >= len(peers)]


def _named(report: dict[str, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the report with the names of peers in place of their ranks."""

    def name(rank: Any) -> str:
        return names.get(rank) or errors.printable(str(rank))

    named = {
        key: errors.printable(value) if isinstance(value, str) else value
        for key, value in report.items()
        if key != "joined"
    }
    for key in RANKS:
        if isinstance(ranks := named.get(key), list):
            named[key] = [name(rank) for rank in ranks]
    if named.get("last_exchange") is not None:
        named["last_exchange"] = name(named["last_exchange"])
    return named
