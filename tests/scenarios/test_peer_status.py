"""The status of a peer during a run: what it does, and what it knows of the others."""

from __future__ import annotations

import pytest
from modes import MODES
from toy import TIMEOUT, bound, ended, until, world

from gossipx.peer.status import status
from gossipx.protocol.events import PeerMet
from gossipx.protocol.fields import MAX_JOINED, JoinedPeer, kind_of
from gossipx.protocol.places import MAX_PLACE, fault
from gossipx.sim import Network
from gossipx.wire import CheckupReply
from gossipx.wire.frames import message_of, metadata_of


def test_a_status_names_the_partner_and_the_last_exchange() -> None:
    made = until(world(2, network=Network(bandwidth=1000.0, delay=0.1)), 0, "pulls 1")
    role = made.peers[0].role
    asking = status(role, made.now)
    assert (asking["stage"], asking["exchanges_with"], asking["last_exchange"]) == ("train", [1], None)
    made = until(made, 0, "mixes 1")
    after = status(role, made.now)
    assert (after["exchanges_with"], after["last_exchange"]) == ([], 1)
    assert after["retrievals"] == 1 and after["iteration"] == role.training.step
    ago = after["last_exchange_seconds"]
    assert isinstance(ago, float) and 0 <= ago <= 1, "it arrived within the iteration"
    assert status(role, made.now + 5)["last_exchange_seconds"] == ago + 5


def test_a_status_tells_suspected_lost_and_left_peers_apart() -> None:
    made = world(3, policy="tau:2")
    made.crash(1, 4.5)
    suspected = until(made, 0, "has no answer of 1")
    role = made.peers[0].role
    found = status(role, suspected.now)
    assert (found["suspects"], found["lost"], found["left"]) == ([1], [], [])
    ended(made, 60 * TIMEOUT)
    found = status(role, made.now)
    assert (found["suspects"], found["lost"]) == ([], [1])


def test_a_waiting_peer_names_the_awaited_peers_and_the_reason() -> None:
    made = world(3, policy="never", slow={2: 4.0})
    until(made, 0, "waiting for peer 2")
    found = status(made.peers[0].role, made.now)
    assert (found["stage"], found["waits_for"], found["waits_to"]) == ("finish", [2], "end its training")


@pytest.mark.fault(80)
def test_the_status_of_a_run_that_as_many_as_can_have_joined_is_sent_whole() -> None:
    """Each name and host as long as can be: the status was then more than a message may have."""
    made = world(2)
    made.run(5.5)
    role = made.peers[0].role
    for rank in range(2, 2 + MAX_JOINED):
        host = f"{rank:060}." * 2 + "x"
        peer = JoinedPeer(rank, "é" * ((MAX_PLACE - len(host)) // 2), host, 29_400, 0)
        assert not fault(peer.host, peer.port, peer.name)
        role.handle(PeerMet(peer), made.now)
    found = status(role, made.now)
    assert len(found["joined"]) == MAX_JOINED  # type: ignore[arg-type]
    for message in (CheckupReply(found), role.stages.here()):
        kind = kind_of(type(message))
        sent = metadata_of(message)
        assert len(sent) <= kind.metadata
        assert message_of(kind, sent) == message


# --- warnings of a peer about its policy's decisions, in virtual time -----------------------------


def lines(made, rank: int, words: str) -> list[str]:
    return [line for line in made.lines(rank, "") if words in line]


@pytest.mark.fault(47)
@pytest.mark.parametrize("exchange", ["pulls", "waves"])
def test_a_policy_that_never_fires_is_told_once_by_each_peer(exchange: str) -> None:
    made = ended(world(2, policy="adaptive:threshold=1e9", iterations=150, exchange=exchange), bound(2, 150))
    for rank, peer in made.peers.items():
        (told,) = lines(made, rank, "has not fired")
        assert "adaptive:threshold=1000000000.0 has not fired in 100 iterations: the delta is " in told
        assert told.endswith("the threshold 1e+09; lower its threshold, or give max_silence=N")
        assert peer.role.sync.retrievals == 0


@pytest.mark.fault(50)
@pytest.mark.parametrize("mode", [{}, *MODES], ids=str)
def test_a_loop_that_is_faster_than_its_exchanges_is_told_once(mode) -> None:
    """An exchange takes several steps, and the policy fires at each step."""
    made = ended(world(2, network=Network(delay=2.5), policy="tau:1", iterations=60, **mode), bound(2, 60))
    for rank, peer in made.peers.items():
        (told,) = lines(made, rank, "decisions to exchange were skipped")
        assert "steps are faster than exchanges; let the policy fire less often, or give --blocking" in told
        assert peer.role.sync.skipped >= 30
