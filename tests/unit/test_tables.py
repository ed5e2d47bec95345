"""Tables on both sides of the wire: values arrive as they were sent, and malformed messages are refused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, strategies
from table_sides import CODED, FLOATS, LaterPieceFirst, OptimizerOf, side, values

from gossipx.errors import ProtocolError
from gossipx.protocol.messages import ModelReply
from gossipx.protocol.server_messages import GradientRequest, TablesReply
from gossipx.server.placement import Placement
from gossipx.tables.client import MOST_ENCODED
from gossipx.tables.parts import Storages, TransmitBuffer, raw

# --- round trips --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("storages", [Storages(), CODED])
@pytest.mark.parametrize("place", ["uniform", "sliced", "heuristic", LaterPieceFirst()])
@pytest.mark.parametrize("least", [0, 40, 10**6])
def test_a_step_on_the_server_is_a_step_here(
    dtype: torch.dtype, storages: Storages, place: str | Placement, least: int
) -> None:
    """Split, empty and scalar tables, raw or encoded. Halves are exact in every dtype."""
    begun = [torch.round(one * 8) / 8 for one in values(dtype)]
    gradients = [torch.round(one * 4) / 4 for one in values(dtype, seed=1)]
    here = side([one.clone() for one in begun], place, storages=storages, least=least)
    here.update(gradients)
    assert sorted(here.whole) == [(shard, number) for shard, cut in enumerate(here.cut) for number in range(len(cut))]
    here.push()
    here.pull()
    for own, before, gradient in zip(here.parameters, begun, gradients, strict=True):
        assert torch.equal(own.detach(), before - 0.5 * gradient) and own.dtype == dtype


def test_tables_of_several_dtypes_share_no_bucket() -> None:
    mixed = [one.to(dtype) for one, dtype in zip(values(), [*FLOATS, torch.float32], strict=True)]
    here = side([one.clone() for one in mixed], "range", 1, least=10**6)
    kinds = [{mixed[one.table].dtype for one in here.placed[0][cut.first : cut.stop]} for cut in here.cut[0]]
    assert all(len(kind) == 1 for kind in kinds) and len(kinds) == 5
    here.update([torch.ones_like(one) for one in mixed])
    here.push()
    here.pull()
    for own, before in zip(here.parameters, mixed, strict=True):
        assert torch.equal(own.detach(), before - 0.5)


def test_a_table_without_a_gradient_has_zeros() -> None:
    decay: OptimizerOf = lambda parameters: torch.optim.SGD(parameters, lr=0.5, weight_decay=0.5)  # noqa: E731
    here = side([torch.full((4,), 8.0), torch.full((4,), 8.0)], optimizer=decay)
    here.update([torch.ones(4), None])
    here.push()
    here.pull()
    assert here.parameters[0].tolist() == [5.5] * 4 and here.parameters[1].tolist() == [6.0] * 4


def test_a_second_gradient_in_an_iteration_is_refused() -> None:
    here = side(values())
    here.client.update(0, torch.ones(3, 4))
    with pytest.raises(ValueError, match="already has a gradient in this iteration"):
        here.client.update(0, torch.ones(3, 4))


def test_a_retry_is_not_encoded_again() -> None:
    """A retry does not call the encoder again, since it may keep a residual."""
    asked: list[int] = []

    class Counts(TransmitBuffer):
        def encode(self) -> bytes:
            asked.append(1)
            return bytes(raw(self.data))

    here = side([torch.zeros(8)], servers=1, storages=Storages(transmit=Counts))
    for iteration in range(3):
        here.update([torch.full((8,), float(iteration))])
        assert bytes(here.request((0, 0))[1]) == bytes(here.request((0, 0))[1])
        assert len(asked) == iteration + 1


# --- malformed messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storages", [Storages(), CODED])
def test_a_push_of_a_wrong_size_is_refused_before_there_is_room(storages: Storages) -> None:
    here = side([torch.zeros(8), torch.zeros(2)], servers=1, storages=storages)
    here.update([torch.ones(8), torch.ones(2)])
    right, _ = here.request((0, 0))
    too_large = MOST_ENCODED * 32 + 65
    wrong = [
        {"parts": ((0, too_large), (1, 8))},
        {"parts": ((0, 32),)},
        {"parts": ((0, 32), (1, 8), (2, 0))},
        {"parts": ((1, 32), (0, 8))},
        {"bucket": 7},
        {"shard": 1},
    ]
    for changed in wrong:
        with pytest.raises(ProtocolError):
            here.table_store.sink_for(msgspec.structs.replace(right, **changed))
    assert not here.table_store._spare._free and here.table_store._places.acquire(
        blocking=False
    )  # it uses neither memory nor a place


@given(strategies.lists(strategies.tuples(strategies.integers(0, 3), strategies.integers(0, 2**62)), max_size=4))
def test_allocations_for_received_parts_are_limited(parts: list[tuple[int, int]]) -> None:
    for storages in (Storages(), CODED):
        here = side([torch.zeros(8), torch.zeros(2)], servers=1, storages=storages)
        request = GradientRequest(0, 0, 1, 0, tuple(parts), (), 5.0)
        try:
            gradient = here.table_store.sink_for(request)
        except ProtocolError:
            pass
        else:
            assert gradient is not None and gradient.nbytes <= MOST_ENCODED * 40 + 128
        sink = here.client.sink((0, 0))
        try:
            sink.fit(TablesReply(0, tuple(parts)))
        except ProtocolError:
            continue
        assert sum(size for _, size in parts) <= MOST_ENCODED * 40 + 128


def test_an_answer_of_another_kind_or_size_is_refused() -> None:
    here = side([torch.zeros(8)], servers=1)
    for reply in (TablesReply(0, ((0, 31),)), TablesReply(0, ()), TablesReply(0, ((1, 32),))):
        with pytest.raises(ProtocolError):
            here.client.sink((0, 0)).fit(reply)
    with pytest.raises(ProtocolError):
        here.client.sink((0, 0)).fit(ModelReply(*[0] * len(ModelReply.__struct_fields__)))  # type: ignore[arg-type]


def test_a_part_that_a_storage_refuses_leaves_its_place_and_the_values() -> None:
    here = side([torch.zeros(8)], servers=1, storages=CODED)
    for turn in range(50):  # more than there are places
        here.update([torch.ones(8)])
        request, _ = here.request((0, 0), parts=((0, 30),), progress=turn)
        gradient = here.table_store.sink_for(request)
        assert gradient is not None
        with pytest.raises(ProtocolError, match="30 bytes for a partition of 32"):
            here.table_store.buffer(gradient) if turn % 2 else here.table_store.apply(gradient, 1.0)
    here.pull()
    assert here.parameters[0].tolist() == [0.0] * 8


# --- buffers of a shard: encoded buckets stay unchanged while they are referenced -----------------


@pytest.mark.parametrize("storages", [Storages(), CODED])
def test_an_encoded_bucket_is_unchanged_while_referenced_and_then_reused(storages: Storages) -> None:
    here = side([torch.zeros(4)], servers=1, storages=storages)
    store = here.stores[0]
    first = store.encode(0)
    assert store.encode(0) is first  # each version is encoded once
    first.release()
    given = []
    for _ in range(5):
        here.update([torch.ones(4)])
        here.push()
        given.append(store.encode(0))
        given[-1].release()
    assert bytes(first.source.view) == bytes(16), "a sender still holds a reference"
    assert torch.frombuffer(bytearray(given[-1].source.view), dtype=torch.float32).tolist() == [-2.5] * 4
    if storages.raw_pulls:
        memory = {id(one.source.view.obj) for one in given}
        assert len(memory) == 1 and id(first.source.view.obj) not in memory
        first.release()
        here.update([torch.ones(4)])
        here.push()
        assert store.encode(0).source.view.obj is first.source.view.obj or len(store._spare._free[16]) == 1


def test_buffers_of_pushes_are_reused() -> None:
    here = side([torch.zeros(4)], servers=1)
    for _ in range(20):
        here.update([torch.ones(4)])
        here.push()
    assert {size: len(free) for size, free in here.table_store._spare._free.items()} == {16: 1}
