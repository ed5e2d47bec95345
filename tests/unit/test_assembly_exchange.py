"""The effect of a run's limits of exchanges on the peers that are built from its settings."""

from __future__ import annotations

import importlib.util
import queue
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import HERE, LONG, soon
from torch import nn

from gossipx import codecs
from gossipx.assembly import server
from gossipx.assembly.graph import build_schedule
from gossipx.assembly.peer import build_peer
from gossipx.assembly.presets import effective_config
from gossipx.assembly.server import Parts, serve
from gossipx.errors import GossipxError, PeerTimeoutError, PeerUnreachableError, UsageError
from gossipx.hub import rank_of_hub
from gossipx.parts import Conditions, Storages, TransmitBuffer
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
from gossipx.server.plan import server_ranks
from gossipx.settings import files
from gossipx.topology import topology_from
from gossipx.transports import Address
from gossipx.wire import Bytes

SIZE = 8
VALUES = 25_000
NOW = 100.0


Make = Callable[..., Peer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds a training peer without starting it."""
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


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        (PullRequest(1, 30.0), {}, 4),
        (PullRequest(1, 30.0), {"max_served": 2}, 2),
        (PullRequest(1, 30.0), {"max_served": 6}, 6),
        (PushRequest(7, 1), {"mode": "push"}, 1),
        (PushRequest(7, 1), {"mode": "push", "max_pushes": 3}, 3),
    ],
)
def test_the_number_of_requests_served_at_once(make: Make, kind: Request, settings: dict[str, Any], most: int) -> None:
    found = [type(answer.reply) for answer in answers(make(**settings), *[kind] * 7)]
    served = ModelReply if isinstance(kind, PullRequest) else AcceptReply
    assert found == [served] * most + [BusyReply] * (7 - most)


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


# --- The topology and the schedule that are built from a run's settings --------------------------------


HOSTS = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_sites_are_the_hosts_unless_the_topology_has_its_own() -> None:
    settings = files.resolve({"schedule": "inner-outer"})
    assert build_schedule(settings, 4, HOSTS).topology.sites == (0, 0, 2, 0)
    assert build_schedule(settings, 4, HOSTS).frequency(1) == pytest.approx({0: 0.45, 3: 0.45, 2: 0.1})
    own = files.resolve({"topology": "hierarchical:sites=2", "schedule": "inner-outer"})
    assert build_schedule(own, 4, HOSTS).topology.sites == (0, 0, 1, 1)


def test_the_topologys_schedule_unless_one_is_given() -> None:
    """A random graph uses the run's seed, and weights have to fit."""
    of_file = build_schedule(files.resolve({"topology": "one-peer-exponential"}), 8)
    given = build_schedule(files.resolve({"topology": "one-peer-exponential", "schedule": "random"}), 8)
    assert of_file.partner(0, 1, of_file.topology.neighbours[0], None, {}) == 2  # type: ignore[arg-type]  # the generator is not used
    assert type(given) is not type(of_file)
    made = [build_schedule(files.resolve({"topology": "regular", "seed": seed}), 20).topology for seed in (3, 4)]
    assert made[0].neighbours == topology_from("regular", 20, 3).neighbours != made[1].neighbours
    with pytest.raises(UsageError, match="metropolis needs an undirected graph"):
        build_schedule(files.resolve({"topology": "exponential", "weights": "metropolis"}), 8)


# --- Server settings that the handshake compares: it refuses a peer that differs, and names the option -


NAMES = ("a", "b", "c")


def alike(parts: Parts | None = None, **given: Any) -> dict[str, str]:
    """Return the settings that must be equal on all peers, by option."""
    module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    served = serve(files.resolve({"servers": "0,1", **given}), NAMES, 0, module, [optimizer], parts or Parts())
    assert served is not None
    return served.alike


def differ(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [option for option in one if one[option] != other[option]]


@pytest.mark.parametrize(
    ("option", "value", "is_compared"),
    [
        ("servers", "0,2", True),
        ("servers_only", True, True),
        ("sync", "ssp:staleness=3", True),
        ("sync", "bsp|asp", True),
        ("apply", "push", True),
        ("pulls", "soft", True),
        ("placement", "sliced", True),
        ("bucket", 0, True),
        ("wait_free", False, False),
        ("overlap", False, False),
        ("server_lost", "stop", False),
        ("journal", False, False),
        ("checkpoint_every", "100", False),
    ],
)
def test_settings_shared_by_shards_and_workers_are_compared(option: str, value: Any, is_compared: bool) -> None:
    """Those of a single peer are not."""
    assert differ(alike(), alike(**{option: value})) == [f"--{option.replace('_', '-')}"] * is_compared


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"servers": "0,3"}, "--servers '3' is not a peer: give a rank from 0 to 2, or a name"),
        ({"servers": "0,0"}, "--servers 0,0 names a peer twice"),
        ({"servers": "0,1,2", "servers_only": True}, "--servers-only leaves no peer that trains"),
        ({"servers": "0", "hub": "1"}, "--hub and --servers exclude each other: leave one out"),
        ({"sync": "asp"}, "--sync needs a parameter server: name its peers with --servers, or leave --sync out"),
        ({"servers": "0", "sync": "bsp|asp"}, "--sync has 2 sync models for 1 shards: give one for all, or one per"),
        ({"servers": "0", "sync": "hybrid", "apply": "tick"}, "applies gradients by its threshold, not 'tick'"),
        ({"hub_only": True}, "--hub-only needs a hub: name it with --hub, or leave --hub-only out"),
        ({"hub": "0", "beta": 4.0}, "--beta 4 moves the centre past a worker's model: at most 3, 1 per worker"),
    ],
    ids=str,
)
def test_servers_and_hubs_that_a_run_refuses(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=re.escape(told)):
        config = effective_config(files.resolve(given), len(NAMES), has_script=False)
        server_ranks(config, NAMES), rank_of_hub(config.mode, NAMES)


class Sparse(TransmitBuffer):
    """A custom storage."""


def test_custom_parts_are_compared() -> None:
    assert differ(alike(), alike(Parts(storages=Storages(transmit=Sparse)))) == ["parts"]
    own = Conditions(pull=lambda view, pull: True, push=lambda view: True)
    assert differ(alike(), alike(Parts(sync=own))) == ["--sync"]


def test_a_codec_says_that_it_was_compiled_only_if_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow import of numba, or of a codec without loops, was called compiling."""
    monkeypatch.setattr(server, "SLOW_COMPILE", 0.0)
    codec = codecs.parse("3lc")
    server.warm_up(codec)
    caplog.clear()
    server.warm_up(codec)
    assert caplog.text == ""
    counts = iter([0, 3])
    monkeypatch.setattr(codecs, "compilations", lambda: next(counts))
    server.warm_up(codec)
    assert "compiling 3lc took" in caplog.text


def test_compiled_loops_are_counted_and_those_read_from_the_cache_are_not(tmp_path: Path) -> None:
    path = tmp_path / "doubled.py"
    path.write_text("from gossipx.codecs.loops import loop\n\n\n@loop\ndef doubled(x):\n    return 2 * x\n")
    codecs.parse("3lc").init(torch.zeros(1))
    for expected in (1, 0):
        before = codecs.compilations()
        spec = importlib.util.spec_from_file_location("doubled", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.doubled(2) == 4
        assert codecs.compilations() - before == expected
