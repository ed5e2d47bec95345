"""The effect of a run's limits of exchanges on the peers that are built from its settings."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest
from managers import HERE, LONG, soon
from torch import nn

from gossipx.assembly.peer import build_peer
from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError
from gossipx.peer.serving import SAVED, SECONDS_PER_MODEL
from gossipx.protocol.effects import Answer
from gossipx.protocol.events import Received
from gossipx.protocol.messages import (
    AcceptReply,
    BusyReply,
    ModelReply,
    PullRequest,
    PushRequest,
    Reply,
    Request,
    Stage,
)
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.place import Place
from gossipx.runtime.training.peer import Peer
from gossipx.settings import files
from gossipx.transports import Address
from gossipx.wire import Bytes

SIZE = 8
VALUES = 25_000
NOW = 100.0


class Make(Protocol):
    """Builds a training peer without starting it."""

    def __call__(self, rank: int = 0, **settings: Any) -> Peer: ...


@pytest.fixture
def make() -> Iterator[Make]:
    addresses = [Address("127.0.0.1", 1)] * SIZE
    names = tuple(f"peer-{rank}" for rank in range(SIZE))

    def made(rank: int = 0, **settings: Any) -> Peer:
        place = Place(rank, names, addresses, HERE, "the same list", None, Progress(None), False)
        given = files.resolve({"policy": "never", "peer_timeout": 20.0, "transport": "tcp", **settings})
        peer = build_peer((module := nn.Linear(VALUES, 1, bias=False)), Optimizers(module, None), given, place)
        undo.callback(peer.close)
        peer._role.stages.stage = Stage.TRAIN
        return peer

    with ExitStack() as undo:
        yield made


def answers(peer: Peer, *requests: Request) -> list[Answer]:
    """Return a peer's answers to simultaneous requests, one from each other peer."""
    role = peer._role
    effects = [role.handle(Received(rank, rank, request), NOW) for rank, request in enumerate(requests, 1)]
    return [effect for some in effects for effect in some if isinstance(effect, Answer)]


def kinds(found: list[Answer]) -> list[type[Reply]]:
    return [type(answer.reply) for answer in found]


@pytest.mark.parametrize(("settings", "most"), [({}, 4), ({"max_served": 2}, 2), ({"max_served": 6}, 6)])
def test_the_number_of_pulls_served_at_once(make: Make, settings: dict[str, Any], most: int) -> None:
    pulls = [PullRequest(1, 30.0)] * 7
    assert kinds(answers(make(**settings), *pulls)) == [ModelReply] * most + [BusyReply] * (7 - most)


@pytest.mark.parametrize(("settings", "most"), [({}, 1), ({"max_pushes": 3}, 3)])
def test_the_number_of_pushes_accepted_at_once(make: Make, settings: dict[str, Any], most: int) -> None:
    pushes = [PushRequest(7, 1)] * 5
    found = kinds(answers(make(mode="push", **settings), *pushes))
    assert found == [AcceptReply] * most + [BusyReply] * (5 - most)


@pytest.mark.parametrize(
    ("settings", "apart"),
    [({}, SECONDS_PER_MODEL / 0.03), ({"serve_share": 0.001}, SECONDS_PER_MODEL / 0.001), ({"serve_share": 1.0}, 0.0)],
)
def test_the_time_between_answers_to_pulls(make: Make, settings: dict[str, Any], apart: float) -> None:
    """The unused share of an earlier period is available at once; after that each answer waits."""
    found = answers(make(max_served=7, **settings), *[PullRequest(1, 30.0)] * 7)
    turns = [NOW - SAVED + number * apart for number in range(7)]
    assert [answer.begins for answer in found] == pytest.approx([max(turn, NOW) for turn in turns])


@pytest.mark.parametrize(("settings", "patience"), [({}, LONG), ({"max_rate": "8kbit"}, 1.0)])
def test_a_model_is_sent_at_the_maximum_rate(make: Make, settings: dict[str, Any], patience: float) -> None:
    """100 kB at 1 kB/s do not arrive within a second; without a limit they do."""
    sender, receiver = make(0, **settings), make(1)
    for rank, peer in enumerate((sender, receiver)):
        peer._comm.start()
        receiver._comm._member.addresses[rank] = peer._comm.address
    came: queue.Queue[Reply | GossipxError] = queue.Queue()
    buffer = bytearray(receiver._arena.nbytes())
    request = PullRequest(1, patience)
    receiver._comm.request(0, request, deadline=soon(patience), payload=Bytes(memoryview(buffer)), done=came.put)
    reply = came.get(timeout=2 * LONG)
    assert isinstance(reply, PeerTimeoutError | PeerUnreachableError if settings else ModelReply)
    whole = sender._arena.slots[0].tensor.detach().numpy().tobytes()
    assert (buffer[: len(whole)] == whole) is not bool(settings)


@pytest.mark.parametrize(("settings", "seconds"), [({}, 20.0), ({"max_rate": "8kbit"}, 2 * 4 * VALUES / 1000)])
def test_the_timeout_of_a_model_follows_the_maximum_rate(make: Make, settings: dict[str, Any], seconds: float) -> None:
    assert make(**settings)._role.members.patience(1) == pytest.approx(seconds, rel=1e-3)
