"""Codecs between workers and servers, and the state that both sides keep for them."""

from __future__ import annotations

import itertools
import queue
from typing import Any

import msgspec
import pytest
import torch
from encoded import SPECS
from table_sides import Side, side
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import Tensors, decode
from gossipx.codecs.changes import FULL, Changes, checksum
from gossipx.errors import ProtocolError, UsageError
from gossipx.protocol.effects import RequestedBucket, Send
from gossipx.protocol.events import Event, Failed, Fault, Replied
from gossipx.protocol.server_messages import TablesReply, TablesRequest
from gossipx.runtime.driver.clock import DriverClock
from gossipx.runtime.driver.outbox import Outbox
from gossipx.runtime.driver.tables import TableWork
from gossipx.server.placement import Bucket, Layout, Partition
from gossipx.tables.coding import Coding, PushEncoder

SHAPES = ((20, 30), (7,), (0,), (40, 10))
OTHER_LAYOUT = Layout(
    (0, 1),
    [
        [Partition(3, 0, 150), Partition(0, 0, 600)],
        [Partition(1, 0, 7), Partition(2, 0, 0), Partition(3, 150, 400)],
    ],
    [[Bucket(0, 2)], [Bucket(0, 1), Bucket(1, 3)]],
)


def normal(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def coded(push: str = "none", pull: str = "none", least: int = 2000, servers: int = 1) -> Side:
    coding = Coding(
        push=None if push == "none" else codecs.parse(push),
        pull=None if pull == "none" else codecs.parse(pull),
        shapes=SHAPES,
        groups=(0,) * len(SHAPES),
    )
    return side(normal(0), servers=servers, least=least, coding=coding)


def table(here: Side, number: int = 0) -> Tensor:
    """Return a server's table, if it is in one piece."""
    for store in here.stores.values():
        for bucket in store.buckets:
            for partition, place in zip(bucket.partitions, bucket.ranges, strict=True):
                if partition.table == number and partition.stop - partition.start == SHAPES[number][0] * 30:
                    return bucket.values[place].view(SHAPES[number])
    raise AssertionError("it is cut")


def encoders(here: Side) -> list[PushEncoder]:
    """Return the encoders of the buckets that were pushed, in order."""
    return [made for one in here.client._buckets.values() if (made := one.push_encoder) is not None]


def left(here: Side) -> Tensor:
    """Return the error feedback of the first table; zeros before the first push, and without error feedback."""
    kept = encoders(here)[0].state.kept if encoders(here) else {}
    return kept.get("error", torch.zeros(600))[:600].view(20, 30).clone()


@pytest.mark.parametrize("spec", SPECS)
def test_a_gradient_that_is_pushed_moves_the_table_by_what_its_frame_says(spec: str) -> None:
    here, plain = coded(push=spec), coded()
    before, lost = table(here).clone(), torch.zeros(20, 30)
    decay = getattr(codecs.parse(spec), "decay", 1.0)
    for seed in range(3):
        gradient = normal(seed)
        here.update(gradient)
        plain.update(gradient)
        lost += (1 - decay) * left(here)
        here.push()
        plain.push()
    if codecs.parse(spec).feedback:
        # The server lags by what error feedback holds or has forgotten; the step is 0.5 times the gradient.
        assert torch.allclose(table(here) - table(plain), 0.5 * (left(here) + lost), atol=1e-5)
    assert bool(table(here).isfinite().all())
    assert spec.startswith("localsteps") or not torch.equal(table(here), before)


def test_what_has_to_be_sent_again_is_the_same_frame() -> None:
    here = coded(push="3lc")
    here.update(normal(1))
    (first, *_) = here.whole
    once, again = (bytes(here.client.encode(first)[1].view) for _ in range(2))
    assert once == again
    here.update(normal(1))
    assert bytes(here.client.encode(first)[1].view) != once  # it includes the error feedback


@pytest.mark.parametrize("spec", ["3lc", "localsteps:k=2"])
def test_gradients_that_are_not_finite_leave_the_error_unchanged(spec: str) -> None:
    here = coded(push=spec, least=10**6)
    here.train(normal(1))
    before, was = encoders(here)[0].state.kept["error"].clone(), table(here).clone()
    bad = normal(2)
    bad[0][3, 3] = float("nan")  # the bucket's other tables are skipped as well
    here.update(bad)
    request, content = here.request((0, 0))
    gradient = here.table_store.sink_for(request)
    assert gradient is not None
    gradient.take(0, memoryview(content))
    gradient.sender = 5
    assert here.table_store.apply(gradient, 1.0) == 5
    assert torch.equal(table(here), was)
    assert len(before) > 600
    assert torch.equal(encoders(here)[0].state.kept["error"], before)


def test_an_invalid_frame_is_refused() -> None:
    here = coded(push="3lc")
    here.update(normal(1))
    request, content = here.request(here.whole[0])
    with pytest.raises(ProtocolError, match="not a valid frame of its bucket"):
        here.table_store.sink_for(msgspec.structs.replace(request, parts=((0, 10**6),)))
    with pytest.raises(ProtocolError, match="not a valid frame of its bucket"):
        here.table_store.sink_for(msgspec.structs.replace(request, parts=((0, 5), (1, 5))))
    other = coded(push="3lc", least=0)
    other.update(normal(1))
    _, wrong = other.request(other.whole[-1])
    for bad in (bytes(len(content)), bytes(wrong)):
        told = msgspec.structs.replace(request, parts=((0, len(bad)),))
        gradient = here.table_store.sink_for(told)
        assert gradient is not None
        gradient.take(0, memoryview(bytearray(bad)))
        was = table(here).clone()
        with pytest.raises(ProtocolError, match="codec's frame"):
            here.table_store.apply(gradient, 1.0)
        assert torch.equal(table(here), was)


def test_a_workers_error_feedback_is_restored() -> None:
    here, again = coded(push="3lc:1.75"), coded(push="3lc:1.75")
    for seed in range(3):
        here.train(normal(seed))
    again.client.load_state_dict(here.saved())
    for one in (here, again):
        one.update(normal(9))
    place = here.whole[0]
    assert bytes(here.client.encode(place)[1].view) == bytes(again.client.encode(place)[1].view)


def test_a_resumed_run_with_another_codec_keeps_the_error(caplog: pytest.LogCaptureFixture) -> None:
    here, other = coded(push="3lc:1.75"), coded(push="topk:ratio=0.1")
    here.train(normal(1))
    state = here.saved()
    other.client.load_state_dict(state)
    kept = [encoders(one)[0].state.kept["error"] for one in (here, other)]
    assert torch.equal(*kept) and bool(kept[0].any())
    for name, without in (("none", coded()), ("qsgd", coded(push="qsgd"))):
        without.client.load_state_dict(state)
        assert f"the error feedback of 3lc:sparsity=1.75 is lost: the codec {name} has none" in caplog.text
    with pytest.raises(UsageError, match="does not fit its bucket"):
        misfit = {**state["pushing"][0], "kept": {"error": torch.zeros(3)}}
        coded(push="3lc", least=10**6, servers=1).client.load_state_dict({**state, "pushing": [misfit]})


@pytest.mark.parametrize(
    ("before", "after"),
    [("powersgd:rank=2", "powersgd:rank=4"), ("dgc:ratio=0.01", "3lc"), ("3lc", "dgc:ratio=0.01"), ("3lc", "3lc:1.5")],
)
def test_from_another_codec_only_the_error_is_restored(before: str, after: str) -> None:
    here, other = coded(push=before), coded(push=after)
    for seed in range(2):
        here.train(normal(seed))
    other.client.load_state_dict(here.saved())
    for one, again in zip(encoders(here), encoders(other), strict=True):
        kept = [{**each.state.kept} for each in (one, again)]
        left = [each.get("error", each.get("gathered")) for each in kept]
        assert left[0] is not None and left[1] is not None
        assert torch.equal(*left) and (bool(left[0].any()) or not len(left[0]))
        assert again.state.frames == 0
        assert "velocity" not in kept[1] or not bool(kept[1]["velocity"].any())


@pytest.mark.parametrize("spec", ["3lc", "3lc:1.75", "localsteps:k=9"])
def test_a_checkpoint_after_a_change_of_servers_encodes_no_gradient_twice(spec: str) -> None:
    """A delivered gradient is not encoded into the error feedback again; a waiting one is encoded once."""
    here = coded(push=spec, servers=2, least=0)
    here.train(normal(1))
    before = errors(here)
    here.client.place(OTHER_LAYOUT, epoch=1)
    assert here.client.state_dict() is not None
    after = errors(here)
    assert all(torch.equal(before[number], after[number]) for number in before)
    here.update(normal(2))
    here.client.state_dict()
    once = errors(here)
    here.client.state_dict()
    assert not torch.equal(after[0], once[0])
    assert all(torch.equal(once[number], one) for number, one in errors(here).items())


def test_errors_move_with_their_values() -> None:
    """Another layout: other cuts, and other servers."""
    here = coded(push="3lc", servers=2, least=0)
    here.train(normal(1))
    before = errors(here)
    assert sum(float(vector.abs().sum()) for vector in before.values()) > 0
    here.client.place(OTHER_LAYOUT, epoch=1)
    after = errors(here)
    assert all(torch.equal(before[number], after[number]) for number in before)
    assert {one.state.frames for one in encoders(here)} == {1}, "so draws do not repeat"


def errors(here: Side) -> dict[int, Tensor]:
    made = {number: torch.zeros(int(torch.tensor(shape).prod())) for number, shape in enumerate(SHAPES)}
    for encoder in encoders(here):
        for partition, vector in encoder.split_vectors()["error"]:
            made[partition.table][partition.start : partition.stop] = vector
    return made


def changes(here: Side, place: tuple[int, int] = (0, 0)) -> Changes:
    found = here.stores[place[0]].buckets[place[1]].changes
    assert found is not None
    return found


# --- pulls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [one for one in SPECS if one != "none" and not codecs.parse(one).gradients_only])
def test_changes_bring_a_worker_close_and_both_sides_agree_on_its_values(spec: str) -> None:
    here = coded(pull=spec)
    here.pull()
    start = table(here).clone()
    assert torch.equal(here.parameters[0], start)  # the first time it receives full values
    for seed in range(8):
        here.train(normal(seed))
        here.pull()
    for place, memory in here.client._buckets.items():
        if memory.apply.view.nbytes:
            assert memory.base == here.client.base(place) == checksum(torch.cat([one.data for one in memory.receivers]))
            assert memory.base in changes(here, place)._bases  # the server's, bit for bit
    behind = float((here.parameters[0].detach() - table(here)).norm()) / float((start - table(here)).norm())
    assert behind < (1.2 if spec.startswith("3lc:sparsity=1.75") else 1.0)


def test_workers_with_the_same_values_are_given_the_same_frame() -> None:
    """3LC, section 3: the frame is compressed once and kept for all workers."""
    here = coded(pull="3lc")
    encode = here.stores[0].encode
    full = [encode(0, worker) for worker in range(4)]
    assert all(given.base == FULL for given in full)
    base = checksum(here.stores[0].buckets[0].served)
    here.train(normal(1))
    given = [encode(0, worker, base) for worker in range(4)]
    assert {id(one.source.view.obj) for one in given} == {id(given[0].source.view.obj)}
    assert all(one.base == base for one in given)
    assert len(changes(here)._bases) == 2  # the values that all have, and those that all were sent


def test_workers_may_have_different_values() -> None:
    here = coded(pull="3lc")
    encode = here.stores[0].encode
    bases = {}
    for worker in range(3):
        encode(0, worker)
        bases[worker] = checksum(here.stores[0].buckets[0].served)
        here.train(normal(worker))
    assert len(set(bases.values())) == 3
    given = [encode(0, worker, base) for worker, base in bases.items()]
    assert [one.base for one in given] == list(bases.values())
    assert len({bytes(one.source.view) for one in given}) == 3
    assert len(changes(here)._bases) == 6  # two per worker, however many requests arrive
    for _ in range(5):
        encode(0, 0, bases[0])
    assert len(changes(here)._bases) == 6


def test_turns_count_per_worker() -> None:
    """With ``localsteps``, every second frame that a worker receives has values, not every second of all workers'
    frames.

    While both still have the initial values, they share frames, and therefore take turns.
    """
    made = Changes(codecs.parse("localsteps:k=2"), Tensors.of(torch.zeros(50)), seed=0)
    made.set_initial(begun := torch.zeros(50))
    base = [checksum(begun)] * 2
    sent: list[list[bool]] = [[], []]
    for version in range(1, 13):
        worker, values = version % 2, torch.full((50,), float(version))
        given = made.frame(worker, base[worker], version, values)
        assert given is not None
        sent[worker].append(given.check != base[worker])
        base[worker] = given.check
    assert all(sum(pair) == 1 for worker in sent for pair in itertools.pairwise(worker[2:]))


def test_draws_differ_per_base() -> None:
    drawn = []
    for values in (torch.zeros(500), torch.ones(500)):
        made = Changes(codecs.parse("qsgd"), Tensors.of(values), seed=0)
        made.set_initial(values)
        given = made.frame(0, made.initial, 1, values + 1)
        assert given is not None
        drawn.append(decode(given.source.view) != 0)
    assert not torch.equal(*drawn)


def test_an_unknown_base_gets_full_values() -> None:
    here = coded(pull="3lc")
    here.pull()
    given = here.table_store.encode(RequestedBucket(0, 0, 0, base=12345))
    assert given.base == FULL
    assert given.source.view.nbytes == here.client._buckets[0, 0].apply.view.nbytes


def test_a_change_of_other_values_is_refused_and_so_is_one_that_is_too_long() -> None:
    here = coded(pull="3lc")
    here.pull()
    sink = here.client.sink((0, 0))
    nbytes = here.client._buckets[0, 0].apply.view.nbytes
    with pytest.raises(ProtocolError, match="change of values that this peer does not have"):
        sink.fit(TablesReply(0, ((0, 20),), base=here.client.base((0, 0)) + 1))
    with pytest.raises(ProtocolError, match=f"bytes for a bucket of {nbytes}"):
        sink.fit(TablesReply(0, ((0, 2**30),), base=here.client.base((0, 0))))
    with pytest.raises(ProtocolError, match=f"20 bytes for a bucket of {nbytes}"):
        sink.fit(TablesReply(0, ((0, 20),)))


def test_partial_and_duplicate_replies_change_nothing() -> None:
    here = coded(pull="3lc")
    here.pull()
    memory, base = here.client._buckets[0, 0], here.client.base((0, 0))
    here.train(normal(1))
    before = bytes(memory.apply.view)
    full, change = (here.table_store.encode(RequestedBucket(0, 0, base=of)) for of in (FULL, base))
    for given in (full, change):
        here.client.sink((0, 0)).fit(TablesReply(0, given.parts, base=given.base)).take(0, given.source.view[:10])
    assert (bytes(memory.apply.view), here.client.base((0, 0))) == (before, base)  # the connection was lost

    sinks = [here.client.sink((0, 0)) for _ in range(2)]  # requested again before the first reply arrived
    for sink in sinks:
        sink.fit(TablesReply(0, change.parts, base=change.base)).take(0, change.source.view)
        here.client.fetched((0, 0), sink)
    assert here.client.base((0, 0)) in changes(here)._bases


def test_pulls_lose_nothing_for_good() -> None:
    """The next frame contains what one leaves out: a worker reaches the table's values without further steps."""
    here = coded(pull="3lc:1.0")
    here.pull()
    here.train(normal(1))
    off = []
    for _ in range(30):
        here.pull()
        off.append(float((here.parameters[0].detach() - table(here)).norm()))
    assert off[-1] < 1e-3 * off[0]


# --- replies that cannot be decoded: training continues, and the request is retried ----------------


class Comm:
    """A CommManager stub that stores requests, for the test to answer."""

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[Any, Any, Any]] = queue.Queue()

    def request(self, to: int, request: Any, deadline: float, payload: Any, done: Any, upload: Any) -> Any:
        self.sent.put((request, payload, done))
        return lambda: None


def damaged(content: bytearray) -> bytearray:
    content[-1] ^= 1
    return content


@pytest.mark.parametrize("damage", [False, True])
def test_tables_that_cannot_be_decoded_count_as_a_failed_request(damage: bool) -> None:
    tables = [torch.randn(20, 30, generator=torch.Generator().manual_seed(1))]
    here: Side = side(tables, servers=1, coding=Coding(pull=codecs.parse("3lc"), shapes=((20, 30),)))
    here.pull()
    here.train([torch.ones(20, 30)])
    events: list[Event] = []
    notes: list[str] = []
    failures: list[Exception] = []
    outbox = Outbox(0, DriverClock(), events.append, lambda _, text: notes.append(text), failures.append)
    work = TableWork(0, DriverClock(), outbox, events.append, reply=lambda *_: None)
    comm = Comm()
    outbox.comm, work.store = comm, here.table_store  # type: ignore[assignment]
    try:
        send = Send(7, 1, TablesRequest(0, 0, 1, 1, 0.0, 5.0), 1e9)
        work.expect(send)
        work.send(send)
        told, sink, done = comm.sent.get(timeout=30)
        base = here.client.base((0, 0))
        assert told.base == base != FULL
        given = here.table_store.encode(RequestedBucket(0, 0, base=base))
        content, before = bytearray(given.source.view), here.client._buckets[0, 0].apply.view.tobytes()
        reply = TablesReply(0, given.parts, base=given.base)
        sink.fit(reply).take(0, memoryview(damaged(content) if damage else content))
        done(reply)
    finally:
        outbox.close()
        work.close()
    assert not failures
    assert here.client._buckets[0, 0].apply.view.tobytes() == before  # until the role decides what happens next
    if damage:
        assert events == [Failed(7, Fault.PROTOCOL)]
        assert "pulled tables cannot be decoded, the pull is retried: a codec's frame does not match" in notes[0]
        assert here.client.base((0, 0)) == FULL  # the next ones are sent in full
    else:
        assert events == [Replied(7, reply)] and not notes
        work.fetched(7)
        assert here.client._buckets[0, 0].apply.view.tobytes() != before
