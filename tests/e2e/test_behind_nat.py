"""Peers that others cannot connect to: CommManagers in one process; nothing listens at the addresses of some."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import managers
import pytest
from certificates import Authority
from emulated import EmulatedNetwork, NetworkUnavailableError, lacking
from emulated.runs import train
from managers import LONG, SECRET, SHORT, Host, Run, frame, introduced, read_frame, soon
from ports import free_ports
from seeds import some
from transfers import python, result

from gossipx.comm.member import HandedOverLinks
from gossipx.errors import CancelledError, PeerFaultError, PeerUnreachableError, UsageError
from gossipx.launch.hosts import PeerLine
from gossipx.protocol.messages import HereReply, LeaveRequest, ModelReply, PullRequest, Stage
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools.query import query
from gossipx.transports import Address, Stream
from gossipx.transports.pace import Pace
from gossipx.wire import RelayedRequest, RelayRequest, ReverseRequest

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
    assert gateway.comm.counts["strangers"] == one.comm.counts["strangers"] == other.comm.counts["strangers"] == 0
    pulls(gateway, 1)
    pulls(one, 0)


def test_connections_of_ranks_that_no_peer_has_are_refused_without_a_traceback(
    start: Start, guard: Callable[[int], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    gateway, one, _ = network(start(3), {0}, guard)
    pulls(one, 2)
    link, _ = one.comm._client.connect(0, soon())
    with pytest.raises(PeerFaultError):
        link.request(RelayRequest(1000), 1, soon())
    link = gateway.comm._listener.kept.take(2, soon())
    link.request(RelayedRequest(1000), 1, soon())
    with pytest.raises(PeerFaultError):
        link.receive(soon())
    pulls(one, 2)
    assert not caplog.records


def test_what_a_gateway_passed_on_cannot_be_replayed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers behind NAT prove the secret to each other, so not even the gateway can repeat what one of them said."""
    sent: list[tuple[Stream, bytes]] = []

    class Recorded:
        def __init__(self, source: Stream, target: Stream):
            self._source, self._target = source, target

        def send(self, parts: list[memoryview], deadline: float) -> None:
            sent.extend((self._source, bytes(part)) for part in parts)
            self._target.send(parts, deadline)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._target, name)

    pump = HandedOverLinks._pump
    monkeypatch.setattr(
        HandedOverLinks, "_pump", lambda kept, source, target: pump(kept, source, Recorded(source, target))
    )
    gateway, one, other = network(start(3), {0}, lambda rank: {"secret": SECRET})
    assert one.ask(2, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)
    other.received.get(timeout=LONG)
    said = b"".join(part for source, part in sent if source is sent[0][0])
    link = gateway.comm._listener.kept.take(2, soon())
    link.request(RelayedRequest(1), 1, soon())
    link.stream.send([memoryview(said)], soon())
    with pytest.raises(PeerFaultError):
        while True:
            link.stream.receive_into(memoryview(bytearray(4096)), soon(SHORT))
    assert other.received.empty()
    pulls(one, 2)


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


def test_a_gateway_stays_while_peers_behind_nat_need_it(start: Start) -> None:
    gateway, one, other = network(start(3), {0})
    pulls(one, 2)
    lingering = threading.Thread(target=gateway.comm.linger, args=(lambda: False,))
    lingering.start()
    for step in range(3):
        pulls(other, 1, step)
        assert lingering.is_alive()
    one.comm.close()
    other.comm.close()
    lingering.join(LONG / 2)  # less than peer_timeout
    assert not lingering.is_alive()


@pytest.mark.parametrize("others", [{0}, {0, 2}], ids=["it is asked to stop", "no two peers are behind NAT"])
def test_a_gateway_does_not_stay_for_ever(start: Start, others: set[int]) -> None:
    gateway, *_ = network(start(3), others)
    gateway.comm.linger(lambda: others == {0})


def test_what_a_gateway_passes_on_keeps_to_its_rate(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    reserve = Pace.reserve

    def count(pace: Pace, nbytes: int, *rest: float) -> float:
        reserved.append(nbytes)
        return reserve(pace, nbytes, *rest)

    monkeypatch.setattr(Pace, "reserve", count)
    run = start(3)
    _, one, _ = network(run, {0}, lambda rank: {"max_rate": 1e9} if rank == 0 else {})
    pulls(one, 2)
    assert len(MODEL) < sum(reserved) < 1.1 * len(MODEL)


def test_memory_alone_cannot_be_shared_with_a_host_behind_nat(start: Start) -> None:
    one, _ = network(start(2), {0}, lambda rank: {"only_memory": rank == 0})
    error = one.ask(1, LeaveRequest()).get(timeout=LONG)
    assert isinstance(error, UsageError)
    assert "no memory can be shared with peer-01; use --transport auto" in str(error)


def test_a_visitor_that_cannot_reach_a_peer_behind_nat_says_where_to_ask() -> None:
    (port,) = free_ports(1)
    peers = [PeerLine(0, "127.0.0.1", port, None, "a", 1, behind_nat=True)]
    (seen,) = query(peers, ExchangeSettings(), "status", peers)
    assert seen.why == "not running (Connection refused); it is behind NAT: ask on its own host"


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


def test_a_cancelled_request_ends_at_both_ends_and_at_the_gateway(start: Start) -> None:
    gateway, one, other = network(start(3), {0})
    other.react = None  # it answers nothing
    results: queue.Queue[Any] = queue.Queue()
    cancel = one.comm.request(2, PullRequest(1, 30.0), deadline=soon(), payload=None, done=results.put)
    _, key, _ = other.received.get(timeout=LONG)
    cancel()
    assert isinstance(results.get(timeout=LONG), CancelledError)
    other.serve(MODEL)
    other.answer(key, ModelReply(1), MODEL)
    assert other.answered.get(timeout=LONG) is False
    pulls(one, 2)
    one.comm.close()
    other.comm.close()
    gateway.comm.linger(lambda: False)  # returns, as nothing is passed on any more


def test_a_peer_that_ends_ends_the_requests_to_it(start: Start) -> None:
    one, hidden = network(start(2), {0})
    hidden.react = None
    pending = one.ask(1, LeaveRequest())
    assert hidden.received.get(timeout=LONG)
    hidden.comm.close()
    assert isinstance(pending.get(timeout=LONG), PeerUnreachableError)


# --- gossipx run, in namespaces of which some drop what would open a connection to them ---------------


@contextlib.contextmanager
def hiding(count: int, hidden: Collection[int]) -> Iterator[EmulatedNetwork]:
    """Yield a network of which these hosts cannot be connected to; skip the test if this system allows none."""
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    with EmulatedNetwork(count, "100mbit", delay_ms=5) as net:
        for number in hidden:
            try:
                net.hosts[number].hide()
            except NetworkUnavailableError as error:
                pytest.skip(f"a firewall is made by nft (nftables): {error}")
            assert not result(python(net.hosts[0], CONNECTS, net.hosts[number].address))
        yield net


CONNECTS = """
    import errno, json, socket, sys
    with socket.socket() as probe:
        probe.settimeout(1.0)
        print(json.dumps(probe.connect_ex((sys.argv[1], 29400)) == errno.ECONNREFUSED))  # no packet was dropped
"""


@pytest.mark.fault(70)
@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize(
    "options",
    some(
        [
            ("--policy", "tau:5", "--blocking"),
            ("--exchange", "waves", "--policy", "tau:10", "--blocking"),
            ("--servers", "1"),
        ],
        ("--policy", "tau:5", "--blocking"),
    ),
)
def test_two_machines_behind_nat_train_with_a_third(tmp_path: Path, options: tuple[str, ...]) -> None:
    with hiding(3, {1, 2}) as net:
        runs = train(net, tmp_path, "x", *options, "--iterations", "40", "--eval-interval", "0", hidden={1, 2})
    for one in runs:
        assert one.lost == [] and one.agreed
        assert None not in one.retrievals and min(one.retrievals) > 0  # type: ignore[type-var]
        assert sum(one.failed) == sum(one.strangers) == 0  # type: ignore[arg-type]
