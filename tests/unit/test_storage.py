"""Tables on both sides of the wire: what goes out comes in, what does not fit is refused, memory is used again."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, strategies
from torch import Tensor, nn

from gossipx.errors import ProtocolError, UsageError
from gossipx.messages import GradientRequest, ModelReply, TablesReply
from gossipx.server import placement
from gossipx.server.buckets import Bucket, buckets
from gossipx.server.placement import Partition, Placement, Table
from gossipx.storage.client import LARGEST, Client
from gossipx.storage.desk import Desk
from gossipx.storage.parts import ApplyBuffer, ServerStorage, Storages, TransmitBuffer, raw
from gossipx.storage.shard import ShardStore

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 4), (5,), (0,), (), (2, 2, 2)]
OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@dataclass
class Side:
    """One peer that is worker and all shards, without roles and a network."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    placed: list[list[Partition]]
    cut: list[list[Bucket]]
    desk: Desk
    stores: dict[int, ShardStore]
    progress: int = 0
    whole: list[tuple[int, int]] = field(default_factory=list)

    @property
    def client(self) -> Client:
        return self.desk.client

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One iteration's gradients; the buckets that are whole are noted, in order."""
        self.whole = []
        for table, gradient in reversed(list(enumerate(gradients))):
            if gradient is not None:
                self.whole += self.client.update(table, gradient)
        self.whole += self.client.flush()

    def request(self, place: tuple[int, int], **changed: Any) -> tuple[GradientRequest, bytearray]:
        """A push as it travels."""
        parts, source = self.client.encode(place)
        made = GradientRequest(*place, 1, self.progress, parts, self.client.settings(place), 5.0)
        return dataclasses.replace(made, **changed), bytearray(source.view)

    def push(self, buffered: bool = False, scale: float = 1.0) -> None:
        """All that is whole to the shards."""
        for place in self.whole:
            request, content = self.request(place)
            gradient = self.desk.room_for(request)
            assert gradient is not None
            gradient.take(0, memoryview(content))
            if buffered:
                self.desk.buffer(gradient)
            else:
                self.desk.apply(gradient, scale)
        self.progress += 1

    def pull(self) -> None:
        """All buckets into the model."""
        places = [(shard, number) for shard, cut in enumerate(self.cut) for number in range(len(cut))]
        self.client.expect(places)
        for place in places:
            given = self.desk.encode(*place)
            sink = self.client.sink(place)
            sink.fit(TablesReply(0, given.parts)).take(0, memoryview(bytearray(given.source.view)))
            self.desk.release(place[0], given)
            self.client.fetched(place, sink)
        assert self.client.ready()
        self.client.apply()


def side(
    parameters: Sequence[Tensor],
    place: str | Placement = "uniform",
    servers: int = 2,
    optimizer: OptimizerOf = sgd,
    storages: Storages | None = None,
    least: int = 40,
) -> Side:
    made = [one if isinstance(one, nn.Parameter) else nn.Parameter(one) for one in parameters]
    tables = [Table(str(number), one.numel()) for number, one in enumerate(made)]
    placed = placement.checked(placement.parse(place), tables, servers)
    cut = [buckets(held, lambda table: (made[table].dtype, made[table].element_size()), least) for held in placed]
    storages = storages or Storages()
    step = optimizer(made)
    groups = {id(one): number for number, group in enumerate(step.param_groups) for one in group["params"]}
    numbers = [groups.get(id(one), -1) for one in made]
    stores = {shard: ShardStore(held, cut[shard], made, numbers, step, storages) for shard, held in enumerate(placed)}
    client = Client(made, placed, cut, storages)
    return Side(made, step, placed, cut, Desk(client, stores, made, step), stores)


def values(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


class Backwards(TransmitBuffer):
    """Sends the values from the last to the first."""

    def encode(self) -> bytes:
        return bytes(raw(self.data.flip(0)))


class FromBehind(ServerStorage):
    def decode(self, encoded: memoryview) -> Tensor:
        return super().decode(encoded).flip(0)

    def encode(self) -> bytes:
        return bytes(raw(self.data.flip(0)))


class TakenFromBehind(ApplyBuffer):
    def decode(self, encoded: memoryview) -> None:
        super().decode(encoded)
        self.data.copy_(self.data.flip(0))


CODED = Storages(transmit=Backwards, server=FromBehind, apply=TakenFromBehind)


class LaterPieceFirst(Placement):
    """Halves each table and gives the second half to the first server."""

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        halves = [(number, table.size // 2, table.size) for number, table in enumerate(tables)]
        return [
            [Partition(number, half, size) for number, half, size in halves],
            [Partition(number, 0, half) for number, half, _ in halves],
        ]


# --- there and back -------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="in this iteration already"):
        here.client.update(0, torch.ones(3, 4))


def test_what_is_sent_again_is_encoded_once() -> None:
    """A push that did not arrive is asked for again; an encoder that keeps what it has not sent is not asked."""
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


# --- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storages", [Storages(), CODED])
def test_a_push_of_a_wrong_size_is_refused_before_there_is_room(storages: Storages) -> None:
    here = side([torch.zeros(8), torch.zeros(2)], servers=1, storages=storages)
    here.update([torch.ones(8), torch.ones(2)])
    right, _ = here.request((0, 0))
    too_large = LARGEST * 32 + 65
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
            here.desk.room_for(dataclasses.replace(right, **changed))
    assert not here.desk._free and here.desk._places.acquire(blocking=False)  # no memory, no place


@given(strategies.lists(strategies.tuples(strategies.integers(0, 3), strategies.integers(0, 2**62)), max_size=4))
def test_no_parts_make_a_peer_allocate_more_than_its_tables_may_be_encoded_to(parts: list[tuple[int, int]]) -> None:
    for storages in (Storages(), CODED):
        here = side([torch.zeros(8), torch.zeros(2)], servers=1, storages=storages)
        request = GradientRequest(0, 0, 1, 0, tuple(parts), (), 5.0)
        try:
            gradient = here.desk.room_for(request)
        except ProtocolError:
            pass
        else:
            assert gradient is not None and gradient.nbytes <= LARGEST * 40 + 128
        sink = here.client.sink((0, 0))
        try:
            sink.fit(TablesReply(0, tuple(parts)))
        except ProtocolError:
            continue
        assert sum(size for _, size in parts) <= LARGEST * 40 + 128


def test_an_answer_of_another_kind_or_size_is_refused() -> None:
    here = side([torch.zeros(8)], servers=1)
    for reply in (TablesReply(0, ((0, 31),)), TablesReply(0, ()), TablesReply(0, ((1, 32),))):
        with pytest.raises(ProtocolError):
            here.client.sink((0, 0)).fit(reply)
    with pytest.raises(ProtocolError):
        here.client.sink((0, 0)).fit(ModelReply(*[0] * len(dataclasses.fields(ModelReply))))  # type: ignore[arg-type]


def test_a_part_that_a_storage_refuses_leaves_its_place_and_the_values() -> None:
    here = side([torch.zeros(8)], servers=1, storages=CODED)
    for turn in range(50):  # more than there are places
        here.update([torch.ones(8)])
        request, _ = here.request((0, 0), parts=((0, 30),), progress=turn)
        gradient = here.desk.room_for(request)
        assert gradient is not None
        with pytest.raises(ProtocolError, match="30 bytes for a partition of 32"):
            here.desk.buffer(gradient) if turn % 2 else here.desk.apply(gradient, 1.0)
    here.pull()
    assert here.parameters[0].tolist() == [0.0] * 8


# --- optimizers -------------------------------------------------------------------------------------------


def two_groups(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> OptimizerOf:
    """Every other table with half the learning rate."""

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        rows = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": options["lr"] / 2}]
        return kind(rows, **options)

    return made


OPTIMIZERS: dict[str, OptimizerOf] = {
    "momentum": two_groups(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": two_groups(torch.optim.Adam, lr=0.1),
    "adamw": two_groups(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "rmsprop": two_groups(torch.optim.RMSprop, lr=0.1, momentum=0.5, centered=True),
    "adagrad": two_groups(torch.optim.Adagrad, lr=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("place", ["uniform", "heuristic", "sliced"])
def test_optimizers_with_two_groups_on_tables_that_are_cut(name: str, place: str) -> None:
    make = OPTIMIZERS[name]
    here = side(values(torch.float64), place, 3, make)
    alone = [nn.Parameter(one) for one in values(torch.float64)]
    optimizer = make(alone)
    for step in range(5):
        for group in (*optimizer.param_groups, *here.optimizer.param_groups):
            group["lr"] *= 0.9  # a schedule's
        gradients = values(torch.float64, seed=10 + step)
        for own, gradient in zip(alone, gradients, strict=True):
            own.grad = gradient
        optimizer.step()
        here.update(gradients)
        here.push()
    here.pull()
    for one, two in zip(here.parameters, alone, strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-12, atol=1e-12)


class Norm(torch.optim.Optimizer):
    """Steps of length lr in each tensor: looks at it whole."""

    def __init__(self, parameters: Any, lr: float = 0.5):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data -= group["lr"] * one.grad / one.grad.norm()


def test_an_optimizer_that_looks_at_whole_tensors() -> None:
    """It is refused where a placement cuts one, and has each by itself, in its shape, where not."""
    with pytest.raises(UsageError, match="Norm looks at whole tensors, which this placement cuts: use heuristic"):
        side([torch.ones(3, 4), torch.ones(4)], "uniform", 2, Norm)
    here = side([torch.zeros(3, 4), torch.zeros(4)], "heuristic", 1, Norm, least=10**6)
    here.update([torch.full((3, 4), 2.0), torch.full((4,), 5.0)])
    here.push()
    here.pull()
    torch.testing.assert_close(here.parameters[0].detach(), torch.full((3, 4), -0.5 / 12**0.5))
    torch.testing.assert_close(here.parameters[1].detach(), torch.full((4,), -0.25))


def test_an_optimizer_that_cannot_be_made_anew_is_refused() -> None:
    class Needs(Norm):
        def __init__(self, parameters: Any, what: str):
            super().__init__(parameters)

    with pytest.raises(UsageError, match="Needs cannot be made anew for a server's tables"):
        side([torch.ones(4)], "heuristic", 1, lambda parameters: Needs(parameters, "this"))


# --- the gradient buffer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffer_is_applied_as_the_mean_of_each_bucket(dtype: torch.dtype) -> None:
    """A bucket that has had two pushes is divided by two, one that has had three by three; then all are empty."""
    here = side([torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)], "range", 1, least=0)
    for number, only_first in enumerate((False, False, True)):
        here.update([torch.full((4,), 2.0**number, dtype=dtype), torch.full((4,), -2.0, dtype=dtype)])
        here.whole = [place for place in here.whole if place == (0, 0) or not only_first]
        here.push(buffered=True)
    here.desk.apply_buffer(0)
    here.pull()
    expected = torch.tensor(-0.5 * (1 + 2 + 4) / 3, dtype=dtype)
    assert here.parameters[0].tolist() == [float(expected)] * 4 and here.parameters[1].tolist() == [1.0] * 4
    here.desk.apply_buffer(0)  # nothing is left in it
    here.pull()
    assert here.parameters[0].tolist() == [float(expected)] * 4


def test_a_share_of_a_gradient() -> None:
    here = side([torch.zeros(4)], servers=1)
    here.update([torch.full((4,), 2.0)])
    here.push(scale=0.25)
    here.pull()
    assert here.parameters[0].tolist() == [-0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_kept_in_float32_and_sent_in_16(dtype: torch.dtype) -> None:
    here = side([torch.ones(4, dtype=dtype)], servers=1, optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-16))
    assert here.desk.encode(0, 0).parts == ((0, 8),)
    for _ in range(2**10):
        here.update([torch.ones(4, dtype=dtype)])
        here.push()
    here.pull()
    assert here.parameters[0].tolist() == [1 - 2.0**-6] * 4


# --- what is given --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storages", [Storages(), CODED])
def test_what_is_given_stays_as_it_was_while_it_is_held_and_its_memory_is_used_again(storages: Storages) -> None:
    here = side([torch.zeros(4)], servers=1, storages=storages)
    store = here.stores[0]
    first = store.encode(0)
    assert store.encode(0) is first  # one version is made once
    store.release(first)
    given = []
    for _ in range(5):
        here.update([torch.ones(4)])
        here.push()
        given.append(store.encode(0))
        store.release(given[-1])
    assert bytes(first.source.view) == bytes(16), "somebody still sends it"
    assert torch.frombuffer(bytearray(given[-1].source.view), dtype=torch.float32).tolist() == [-2.5] * 4
    if storages.raw_pulls:
        assert len({id(one.memory) for one in given}) == 1 and given[0].memory is not first.memory
        store.release(first)
        here.update([torch.ones(4)])
        here.push()
        assert store.encode(0).memory is first.memory or len(store._free[16]) == 1


def test_memory_of_pushes_is_used_again() -> None:
    here = side([torch.zeros(4)], servers=1)
    for _ in range(20):
        here.update([torch.ones(4)])
        here.push()
    assert {size: len(free) for size, free in here.desk._free.items()} == {16: 1}


# --- buckets ------------------------------------------------------------------------------------------------


SIZES = strategies.lists(strategies.tuples(strategies.integers(0, 50), strategies.sampled_from("ab")), max_size=20)


@given(SIZES, strategies.integers(0, 120))
def test_buckets_hold_all_in_order_alike_and_no_more_than_they_should(sizes: list[tuple[int, str]], least: int) -> None:
    partitions = [Partition(number, 0, size) for number, (size, _) in enumerate(sizes)]
    made = buckets(partitions, lambda table: (sizes[table][1], 4), least)
    ends = [0, *(one.stop for one in made)]
    assert [one.first for one in made] == ends[:-1] and ends[-1] == len(sizes)
    for one in made:
        held = sizes[one.first : one.stop]
        assert held and len({kind for _, kind in held}) == 1
        assert len(held) == 1 or 4 * sum(size for size, _ in held) <= least
    for one, other in itertools.pairwise(made):  # none could have taken the next one in
        held, (size, kind) = sizes[one.first : one.stop], sizes[other.first]
        assert held[0][1] != kind or 4 * (sum(of for of, _ in held) + size) > least


def test_with_zero_each_table_of_some_elements_travels_alone() -> None:
    partitions = [Partition(number, 0, 3) for number in range(4)]
    assert buckets(partitions, lambda table: ("float32", 4), 0) == [Bucket(n, n + 1) for n in range(4)]
    assert buckets([], lambda table: ("float32", 4), 0) == []
