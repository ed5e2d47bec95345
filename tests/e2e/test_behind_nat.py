"""Peers that others cannot connect to: CommManagers in one process; nothing listens at the addresses of some."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import managers
import pytest
from certificates import Authority
from managers import LONG, SECRET, Host, Run, frame, introduced, read_frame

from gossipx.errors import GossipxError, PeerUnreachableError
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, Stage
from gossipx.transports import Address
from gossipx.wire.reversal import RelayedRequest, RelayRequest, ReverseRequest

start = managers.start
Start = Callable[[int], Run]
MODEL = os.urandom(3_000_001)


@pytest.fixture(params=["plain", "secret", "tls"])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Return a function that returns the settings of a manager by rank; its host is 127.0.0.<rank + 1>."""
    authority = Authority(tmp_path) if request.param == "tls" else None

    def settings(rank: int) -> dict[str, Any]:
        if authority is not None:
            return {"transport": authority.issue(f"127.0.0.{rank + 1}").transport()}
        return {"secret": SECRET} if request.param == "secret" else {}

    yield settings


def behind_nat(run: Run, rank: int, **settings: Any) -> Host:
    """Start a peer to whose address nobody can connect."""
    place = Address(f"127.0.0.{rank + 1}", 1, behind_nat=True)
    run.addresses[rank] = place
    made = run.host(rank, bind=Address("127.0.0.1", 0), share_memory=False, **settings)
    run.addresses[rank] = place
    return made


def reachable(run: Run, rank: int, **settings: Any) -> Host:
    return run.host(rank, bind=Address(f"127.0.0.{rank + 1}", 0), share_memory=False, **settings)


def network(run: Run, open_ranks: set[int], guard: Callable[[int], dict[str, Any]] = lambda rank: {}) -> list[Host]:
    """Start all peers: those in ``open_ranks`` listen, the others are behind NAT on hosts of their own."""
    for rank in range(len(run.names)):
        run.addresses[rank] = Address(f"127.0.0.{rank + 1}", 1, behind_nat=rank not in open_ranks)
    made = {rank: reachable(run, rank, **guard(rank)) for rank in open_ranks}
    made |= {rank: behind_nat(run, rank, **guard(rank)) for rank in range(len(run.names)) if rank not in open_ranks}
    for host in made.values():
        host.serve(MODEL)
    return [made[rank] for rank in range(len(run.names))]


def pulls(one: Host, to: int, step: int = 1) -> None:
    buffer = bytearray(len(MODEL))
    assert one.ask(to, PullRequest(step, 30.0), buffer).get(timeout=LONG) == ModelReply(step)
    assert buffer == MODEL


def test_models_go_both_ways_over_connections_that_one_side_opens(
    start: Start, guard: Callable[[int], dict[str, Any]]
) -> None:
    one, hidden = network(start(2), {0}, guard)
    for step in range(3):
        pulls(one, 1, step)
        pulls(hidden, 0, step)
    asked = [one.ask(1, LeaveRequest()) for _ in range(20)]  # more than there are connections ready
    assert [each.get(timeout=LONG) for each in asked] == [HereReply(Stage.TRAIN)] * 20
    assert {sender for sender, _, _ in list(hidden.received.queue)} == {0}


def test_two_peers_behind_nat_meet_at_a_third(start: Start, guard: Callable[[int], dict[str, Any]]) -> None:
    gateway, one, other = network(start(3), {0}, guard)
    for step in range(3):
        pulls(one, 2, step)
        pulls(other, 1, step)
    assert gateway.received.empty(), "the third one passes on what is not for it"
    assert {sender for sender, _, _ in list(other.received.queue)} == {1}
    assert gateway.comm.trust.strangers == one.comm.trust.strangers == other.comm.trust.strangers == 0
    pulls(gateway, 1)
    pulls(one, 0)


def test_another_gateway_takes_over(start: Start) -> None:
    first, second, one, other = network(start(4), {0, 1})
    pulls(one, 3)
    first.comm.close()
    pulls(one, 3)
    pulls(other, 2)
    second.comm.close()
    error = one.ask(3, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)
    assert "peer-03: it is behind NAT, as this peer is: " in str(error)


@pytest.mark.parametrize("which", ["the one behind NAT", "the other"])
def test_a_process_that_is_replaced_is_found_again(start: Start, which: str) -> None:
    run = start(2)
    one, hidden = network(run, {0})
    pulls(one, 1)
    if which == "the other":
        place = run.addresses[0]
        one.comm.close()
        one = run.host(0, bind=place, share_memory=False)
        one.serve(MODEL)
    else:
        hidden.comm.close()
        hidden = behind_nat(run, 1)
        hidden.serve(MODEL)
    pulls(one, 1)
    pulls(hidden, 0)


def test_a_peer_that_has_not_connected_is_unreachable_soon(start: Start) -> None:
    run = start(2)
    run.addresses[1] = Address("127.0.0.2", 1, behind_nat=True)
    one = run.host(0, peer_timeout=2.0)
    error = one.ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, PeerUnreachableError)
    assert str(error) == "peer-01: it is behind NAT, and has not connected to this peer"


def test_a_peer_that_others_reach_hands_no_connection_over(start: Start) -> None:
    """Else it could take requests that are meant for the process at its address."""
    run = start(3)
    one = run.host(0)
    for message in (ReverseRequest(), RelayRequest(2), RelayedRequest(2)):
        with introduced(one, 1, run.names) as stream:
            stream.sendall(frame(message))
            assert read_frame(stream) is None
    assert one.received.empty()


def test_cancelled_and_closed_requests_end(start: Start) -> None:
    one, hidden = network(start(2), {0})
    hidden.react = None  # it answers nothing from now on
    pending = one.ask(1, LeaveRequest())
    assert hidden.received.get(timeout=LONG)
    hidden.comm.close()
    assert isinstance(pending.get(timeout=LONG), GossipxError)
    one.comm.close()
