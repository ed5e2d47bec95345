"""A shard that is restored from its checkpoints and journals, without a peer role and a network."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from managers import HERE
from small_disks import SmallDisk
from table_sides import Side, side, values
from torch import nn

from gossipx.assembly.peer import build_peer
from gossipx.checkpoint import CheckpointError, Store, journal_clocks, journal_path
from gossipx.peer.membership import Requests
from gossipx.protocol.effects import Effect
from gossipx.protocol.events import Received
from gossipx.protocol.table_effects import ApplyGradient, FillTables, KeepShard, Record, ShardRecord
from gossipx.runtime.driver import shards
from gossipx.runtime.driver.shards import ShardKeeper
from gossipx.runtime.figures.progress import Progress
from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.place import Place
from gossipx.server.mode import ServerMode
from gossipx.server.shard import Records, Shard
from gossipx.server.shard_clock import ShardClock
from gossipx.server.sync_models import sync_model_from
from gossipx.settings import files
from gossipx.tables.store import Gradient

EVERY = 2


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """End the threads of all servers after the test."""
    yield
    for server in Server.started:
        server.keeper.close()
    Server.started.clear()


class Server:
    """One process with one shard and one worker under asp; a checkpoint is taken every two ticks.

    Args:
        epoch: the epoch of the layout when the process is restarted.

    Attributes:
        back: whether the shard was restored.
    """

    started: ClassVar[list[Server]] = []

    def __init__(self, directory: Path, epoch: int = 0):
        self.started.append(self)
        self.side: Side = side(values(), servers=1)
        self.store = Store(directory / "checkpoints", keep=5)
        self.keeper = ShardKeeper({0: self.store}, self.side.table_store, self.fresh, (0,), journals=True)
        self._epoch = 0
        if epoch:
            self._place(epoch)
        self.shard = self.fresh(0, (epoch,))
        state = self.keeper.restore_tables(0)
        self.back = state is not None
        if state is not None:
            self.shard.load_state_dict(state)
            self.shard.records.number = state["next_record"]
        if self.back:
            self._do(self.shard.serve(0.0))
        elif not epoch:
            self._do(self.shard.begin(0.0))

    def fresh(self, index: int, servers: Sequence[int]) -> Shard:
        assert list(servers) == [self._epoch]
        clock = ShardClock(sync_model_from("asp"), workers=[0])
        made = Shard(index, len(self.side.cut[0]), clock, Requests(), EVERY)
        made.records = Records(index, self._epoch, enabled=True)
        return made

    def _place(self, epoch: int) -> None:
        self._epoch = epoch
        self.keeper.place(epoch, (epoch,))

    def change(self, epoch: int, before: Server | None = None) -> None:
        """Change the servers: this one gets the shard of ``before``; None: it keeps its own."""
        before = before or self
        state = before.shard.hand_over()
        self.side.table_store.load_state_dict(0, before.side.table_store.state_dict(0))
        self._place(epoch)
        self.shard = self.fresh(0, (epoch,))
        self._do(self.shard.take_over(state))

    @property
    def values(self) -> list[torch.Tensor]:
        return [bucket.values.clone() for bucket in self.side.stores[0].buckets]

    def push(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(iteration)
        self.side.progress = iteration
        self.side.update([torch.randn(one.shape, generator=generator) for one in self.side.parameters])
        for place in self.side.whole:
            request, content = self.side.request(place)
            gradient = self.side.table_store.sink_for(request)
            assert gradient is not None
            gradient.take(0, memoryview(content))
            effects = self.shard.requested(Received(0, place, request), request, 0.0)
            self._do([*effects, *self.shard.checkpoint()], gradient)

    def _do(self, effects: list[Effect], gradient: Gradient | None = None) -> None:
        for effect in effects:
            match effect:
                case FillTables():
                    self.side.table_store.fill(0)
                case Record(record, ticket):
                    kept = gradient if ticket is not None else None
                    self.keeper.record(record, kept and kept.hold())
                case ApplyGradient(_, scale):
                    assert gradient is not None
                    self.side.table_store.apply(gradient, scale)
                case KeepShard(shard, clock, state):
                    self.keeper.save_checkpoint(shard, clock, state)
                    written = threading.Event()
                    self.keeper._serial_worker.put(written.set)
                    assert written.wait(10)


def pushed(server: Server, iterations: range) -> Server:
    for iteration in iterations:
        server.push(iteration)
    return server


def alike(one: Server, other: Server) -> bool:
    return all(map(torch.equal, one.values, other.values))


def test_a_first_checkpoint_that_takes_too_long_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path)
    monkeypatch.setattr(shards, "CLOSE_TIMEOUT", 0.01)
    written = threading.Event()
    server.keeper._serial_worker.put(lambda: written.wait(10))
    server.keeper.place(1, (1,))
    server.keeper.save_checkpoint(0, 1, server.shard.state_dict())
    written.set()
    assert "shard 0: its first checkpoint takes too long to write: if this peer is killed" in caplog.text


@pytest.mark.fault(57)
def test_a_disk_that_is_full_for_a_while(small_disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    """Training continues without a journal; the next checkpoint that there is room for protects all pushes again."""
    place = small_disk.path / "shard-00"
    before = pushed(Server(place), range(3))
    small_disk.fill()
    pushed(before, range(3, 60))
    missed = before.keeper.unwritten
    assert missed > 20
    assert sum("the journal cannot be written until the next checkpoint" in text for text in caplog.messages) == 1
    assert sum("the checkpoint cannot be written" in text for text in caplog.messages) == 1
    small_disk.free()
    pushed(before, range(60, 63))
    assert before.keeper.unwritten - missed <= 1, "until the next checkpoint"
    assert alike(before, Server(place))


def damage(store: Store) -> int:
    """Damage the newest checkpoint, and return its clock."""
    newest = store.find()
    assert newest is not None
    (tables,) = store.directory.glob(f"*{newest}/tables*.safetensors")
    tables.write_bytes(tables.read_bytes()[:-1])
    return newest


@pytest.mark.parametrize("pushes", [0, 1, 2, 5])
def test_a_shard_is_restored_with_all_pushes(tmp_path: Path, pushes: int) -> None:
    before = pushed(Server(tmp_path), range(pushes))
    after = Server(tmp_path)  # the first process was killed, so it closed nothing
    assert alike(before, after) and after.shard.clock.clock == pushes
    after.push(pushes)
    before.push(pushes)
    assert alike(before, after)


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_checkpoints_are_kept_as_for_peers(tmp_path: Path, keep: int) -> None:
    """``--keep-checkpoints`` applies to shards, in a peer that is built as in a run."""
    place = Place(0, ("a",), (HERE,), HERE, "the same list", tmp_path, Progress(None), False)
    given = files.resolve({"servers": "0", "keep_checkpoints": keep, "checkpoint_every": "1"})
    module = nn.Linear(4, 3)
    peer = build_peer(module, Optimizers(module, torch.optim.SGD(module.parameters(), lr=0.1)), given, place)
    try:
        tables, exchange = peer._driver.tables, peer._role.exchange
        keeper, table_store = tables.keeper, tables.store
        assert keeper is not None and table_store is not None and isinstance(exchange, ServerMode)
        table_store.fill(0)
        for clock in range(5):
            keeper.save_checkpoint(0, clock, exchange.shards[0].state_dict())
            assert keeper.settle()
            assert max(Store(tmp_path / "shard-00" / "checkpoints").find_complete()) == clock
    finally:
        peer.close()
    assert Store(tmp_path / "shard-00" / "checkpoints").find_complete() == set(range(5 - keep, 5))


def test_a_leaving_server_saves_the_shard_it_was_handed_at_that_clock(tmp_path: Path) -> None:
    """All peers got SIGTERM; the shard's earlier server has a checkpoint of this clock, but of the old layout."""

    def kept(shard: Shard) -> list[int]:
        return [one.clock for one in shard.checkpoint(leaves=True) if isinstance(one, KeepShard)]

    server = Server(tmp_path)
    server.push(0)
    assert kept(server.shard) == [1]
    after = server.fresh(0, (0,))
    after.records = Records(0)
    assert after.take_over(server.shard.hand_over()) == [], "there are no journals"
    assert after.checkpoint() == [], "none is due"
    assert kept(after) == [1]
    assert kept(after) == []


def test_no_record_is_replayed_after_a_gap_in_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The disk was full between two checkpoints, and the second of them is damaged."""
    before = pushed(Server(tmp_path), range(EVERY + 1))
    known = before.values
    before.keeper._journals.pop(0).close()  # as if the journal could not be written
    pushed(before, range(EVERY + 1, 2 * EVERY + 1))
    damage(before.store)
    after = Server(tmp_path)
    assert f"the journal has a gap between clocks {EVERY} and {2 * EVERY}" in caplog.text
    assert all(map(torch.equal, known, after.values))
    after.push(EVERY + 1)  # and it continues from there
    assert alike(after, Server(tmp_path))


def test_a_record_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    """JSON has no NaN: the restart would have ended at this record, and lost all later pushes."""
    server = Server(tmp_path)
    with pytest.raises(ValueError, match="got `null`"):
        server.keeper.record(ShardRecord(0, 0, 0, (), 0, 0, (), ({"lr": float("nan")},)), None)


@pytest.mark.parametrize("words", [b"", b"{}", b'{"shard":0}', b"\xff"])
def test_no_record_is_replayed_after_one_of_another_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, words: bytes
) -> None:
    """It is whole, but its fields are not those of this version; it ended the restart with a ProtocolError."""
    before = pushed(Server(tmp_path), range(EVERY + 1))
    before.keeper._journals[0].append(words, memoryview(b"12345678"))
    assert alike(before, Server(tmp_path))
    assert f"the journal has a gap between clocks {EVERY} and {EVERY}" in caplog.text


@pytest.mark.fault(44)
@pytest.mark.parametrize("harm", ["cut to half", "a bit flipped"])
def test_a_damaged_journal_is_named_and_training_continues_from_what_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    before = pushed(Server(tmp_path), range(2 * EVERY + 1))
    path = journal_path(tmp_path, max(journal_clocks(tmp_path)))
    content = bytearray(path.read_bytes())
    if harm == "cut to half":
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 4
    path.write_bytes(content)
    after = Server(tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if str(path) in record.getMessage()]
    assert "are damaged or not complete: the changes of shard 0 in them are lost" in line
    assert after.back and after.shard.clock.clock < before.shard.clock.clock
    assert alike(pushed(after, range(9, 11)), Server(tmp_path)), "and it is restored again"


# --- after the servers were changed -------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("since", [0, 1, 4])
def test_a_shard_is_restored_in_the_new_layout(tmp_path: Path, elsewhere: bool, before: int, since: int) -> None:
    """The shard stays, or moves to another process of this machine that writes to the same directory."""
    first = pushed(Server(tmp_path), range(before))
    holder = Server(tmp_path / "new") if elsewhere else first
    holder.store.directory = first.store.directory
    holder.change(1, first)
    pushed(holder, range(before, before + since))
    after = Server(tmp_path, epoch=1)
    assert after.back and alike(holder, after)
    assert after.shard.clock.clock == before + since
    assert alike(pushed(holder, range(9, 12)), pushed(after, range(9, 12)))
    assert alike(after, Server(tmp_path, epoch=1)), "and it is restored again"


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_checkpoint_of_another_layout_is_not_used(tmp_path: Path, epoch: int) -> None:
    """The servers were changed after the kill, even if to the same ones; or the server missed the change."""
    server = pushed(Server(tmp_path), range(3))
    server.change(1)
    pushed(server, range(3, 4))
    assert not Server(tmp_path, epoch).back


def test_no_record_is_replayed_onto_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new layout's first checkpoint cannot be written, its journal can."""
    server = pushed(Server(tmp_path), range(EVERY))
    known = server.values

    def full(self: Store, iteration: int, parts: object) -> None:
        raise CheckpointError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "save", full)
        server.change(1)
        server.push(EVERY)
    assert not Server(tmp_path, epoch=1).back
    assert all(map(torch.equal, known, Server(tmp_path).values))


def test_the_first_checkpoint_of_a_layout_is_written_before_anything_else_is_done(tmp_path: Path) -> None:
    """This holds however long the checkpoint before it takes."""
    server = pushed(Server(tmp_path), range(EVERY))
    slow = threading.Event()
    server.keeper._serial_worker.put(lambda: slow.wait(10))
    timer = threading.Timer(0.2, slow.set)
    timer.start()
    server.keeper.place(1, (1,))
    server.keeper.save_checkpoint(0, EVERY, {**server.shard.state_dict(), "next_record": 0})
    assert slow.is_set() and EVERY in server.store.find_complete()
    timer.join()


def test_a_damaged_checkpoint_of_a_later_layout(tmp_path: Path) -> None:
    """The checkpoint of the change is complete and has a journal; without it nothing can be restored."""
    server = pushed(Server(tmp_path), range(EVERY - 1))
    server.change(1)
    pushed(server, range(EVERY - 1, 2 * EVERY - 1))
    assert damage(server.store) == EVERY
    after = Server(tmp_path, epoch=1)
    assert after.back and alike(server, after)
    (tables,) = server.store.directory.glob(f"*{EVERY - 1}/tables*.safetensors")
    tables.unlink()
    assert not Server(tmp_path, epoch=1).back


def test_a_resumed_run_counts_epochs_from_zero(tmp_path: Path) -> None:
    """--resume uses the last servers, which config.toml names; a server killed then is restored at epoch 0."""
    server = pushed(Server(tmp_path), range(3))
    server.keeper.place(1, (0,))
    server.keeper.save_checkpoint(0, 3, {**server.shard.state_dict(), "next_record": 0})
    resumed = Server(tmp_path / "new")
    resumed.store.directory = server.store.directory
    resumed.keeper.place(0, (0,))
    resumed.shard = resumed.fresh(0, (0,))
    resumed.keeper.resume(resumed.shard, 3)
    resumed._do(resumed.shard.begin(0.0))
    assert alike(server, resumed)
    pushed(resumed, range(3, 6))
    after = Server(tmp_path)
    assert after.back and alike(resumed, after)
