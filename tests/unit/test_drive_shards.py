"""A shard that comes back from its checkpoints and journals, without roles and a network."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from managers import HERE
from sides import Side, side, values
from torch import nn

from gossipx import build, config
from gossipx.actor import Effect, Received
from gossipx.checkpoint import Store
from gossipx.drive.progress import Progress
from gossipx.drive.shards import ShardKeeper
from gossipx.peer.requests import Requests
from gossipx.server.clock import Clock
from gossipx.server.mode import ServerMode
from gossipx.server.models import parse
from gossipx.server.records import Journal
from gossipx.server.shard import Shard
from gossipx.storage.desk import Gradient
from gossipx.table_effects import ApplyGradient, FillTables, KeepShard, Record

EVERY = 2


class Server:
    """One process that holds one shard, kept every two ticks, for one worker under asp."""

    def __init__(self, directory: Path):
        self.side: Side = side(values(), servers=1)
        self.store = Store(directory / "checkpoints", keep=5)
        self.keeper = ShardKeeper({0: self.store}, self.side.desk, self._fresh, (0,), journals=True)
        self.shard = self._fresh(0)
        state = self.keeper.come_back(0)
        if state is not None:
            self.shard.load_state_dict(state)
            self.shard.records.number = state["next_record"]
        self._do(self.shard.begin(0.0))

    def _fresh(self, index: int) -> Shard:
        clock = Clock(parse("asp"), workers=[0])
        made = Shard(index, len(self.side.cut[0]), clock, Requests(), every=(EVERY, 0.0))
        made.records = Journal(index)
        return made

    @property
    def values(self) -> list[torch.Tensor]:
        return [bucket.values.clone() for bucket in self.side.stores[0].buckets]

    def push(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(iteration)
        self.side.progress = iteration
        self.side.update([torch.randn(one.shape, generator=generator) for one in self.side.parameters])
        for place in self.side.whole:
            request, content = self.side.request(place)
            gradient = self.side.desk.room_for(request)
            assert gradient is not None
            gradient.take(0, memoryview(content))
            effects = self.shard.requested(Received(0, place, request), 0.0)
            self._do([*effects, *self.shard.keep(0.0)], gradient)

    def _do(self, effects: list[Effect], gradient: Gradient | None = None) -> None:
        for effect in effects:
            match effect:
                case FillTables():
                    self.side.desk.fill(0)
                case Record(record, ticket):
                    brought = gradient if ticket is not None else None
                    self.keeper.record(record, brought and brought.hold())
                case ApplyGradient(_, scale):
                    assert gradient is not None
                    self.side.desk.apply(gradient, scale)
                case KeepShard(shard, clock, state):
                    self.keeper.keep(shard, clock, state)
                    written = threading.Event()
                    self.keeper._lane.put(written.set)
                    assert written.wait(10)


def damage(store: Store) -> int:
    """The newest checkpoint cannot be used any more; its clock."""
    newest = store.find()
    assert newest is not None
    (tables,) = store.directory.glob(f"*{newest}/tables*.safetensors")
    tables.write_bytes(tables.read_bytes()[:-1])
    return newest


@pytest.mark.parametrize("pushes", [0, 1, 2, 5])
def test_it_comes_back_with_all_that_was_pushed(tmp_path: Path, pushes: int) -> None:
    before = Server(tmp_path)
    for iteration in range(pushes):
        before.push(iteration)
    after = Server(tmp_path)  # the one before was killed: nothing of it was closed
    assert all(map(torch.equal, before.values, after.values))
    assert after.shard.clock.clock == pushes
    after.push(pushes)
    before.push(pushes)
    assert all(map(torch.equal, before.values, after.values))


def test_it_comes_back_twice(tmp_path: Path) -> None:
    before = Server(tmp_path)
    for iteration in range(3):
        before.push(iteration)
    second = Server(tmp_path)
    second.push(3)
    third = Server(tmp_path)
    assert all(map(torch.equal, second.values, third.values))


def test_a_damaged_checkpoint_costs_nothing(tmp_path: Path) -> None:
    before = Server(tmp_path)
    for iteration in range(2 * EVERY + 1):
        before.push(iteration)
    assert damage(before.store) == 2 * EVERY
    assert all(map(torch.equal, before.values, Server(tmp_path).values))


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_are_kept_as_of_peers(tmp_path: Path, keep: int) -> None:
    """``--keep-checkpoints``, in a peer that is put together as in a run."""
    place = build.Place(0, ("a",), (HERE,), HERE, "the same list", tmp_path, Progress(None), False)
    given = config.resolve({"servers": "0", "policy": "never", "keep_checkpoints": keep, "checkpoint_every": "1"})
    module = nn.Linear(4, 3)
    peer = build.peer(module, torch.optim.SGD(module.parameters(), lr=0.1), given, place)
    try:
        keeper, desk, exchange = peer._driver.tables.keeper, peer._driver.transfers.desk, peer._role.exchange
        assert keeper is not None and desk is not None and isinstance(exchange, ServerMode)
        desk.fill(0)
        for clock in range(5):
            keeper.keep(0, clock, exchange.shards[0].state_dict())
            assert keeper.settle()
            assert max(Store(tmp_path / "shard-00" / "checkpoints").whole()) == clock
    finally:
        peer.close()
    assert Store(tmp_path / "shard-00" / "checkpoints").whole() == set(range(5 - keep, 5))


def test_who_leaves_keeps_what_it_was_handed_at_that_clock(tmp_path: Path) -> None:
    """SIGTERM has come to all: the one that held the shard had kept it, but by the layout of before."""

    def kept(shard: Shard) -> list[int]:
        return [one.clock for one in shard.keep(0.0, leaves=True) if isinstance(one, KeepShard)]

    server = Server(tmp_path)
    server.push(0)
    assert kept(server.shard) == [1]
    after = server._fresh(0)
    after.take_over(server.shard.hand_over(), 0.0)
    assert after.keep(0.0) == [], "none is due"
    assert kept(after) == [1]
    assert kept(after) == []


def test_nothing_is_taken_from_beyond_what_was_not_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk was full between two checkpoints, and the second of them is damaged."""
    before = Server(tmp_path)
    for iteration in range(EVERY + 1):
        before.push(iteration)
    known = before.values
    before.keeper._journals.pop(0).close()  # as if it could not be written
    for iteration in range(EVERY + 1, 2 * EVERY + 1):
        before.push(iteration)
    damage(before.store)
    caplog.set_level(logging.WARNING, "gossipx")
    after = Server(tmp_path)
    assert f"no journal has what happened between clocks {EVERY} and {2 * EVERY}" in caplog.text
    assert all(map(torch.equal, known, after.values))
    after.push(EVERY + 1)  # and it goes on from there
    assert all(map(torch.equal, after.values, Server(tmp_path).values))
