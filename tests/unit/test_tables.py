"""Tables on both sides of the wire, and a shard's steps.

Values arrive as they were sent, and malformed messages are refused. Steps: supported optimizers, the gradient buffer,
and 16-bit tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, strategies
from table_sides import CODED, FLOATS, LaterPieceFirst, OptimizerOf, Side, side, values
from torch import Tensor, nn

from gossipx.errors import ProtocolError, UsageError
from gossipx.protocol.effects import RequestedBucket
from gossipx.protocol.fields import kind_of
from gossipx.protocol.messages import ModelReply
from gossipx.protocol.server_messages import GradientRequest, TablesReply
from gossipx.server.placement import Placement
from gossipx.tables.client import MOST_ENCODED
from gossipx.tables.coding import group_settings
from gossipx.tables.parts import ServerStorage, Storages, TransmitBuffer, raw
from gossipx.wire.frames import message_of, metadata_of

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
    here.train([torch.ones_like(one) for one in mixed])
    here.pull()
    for own, before in zip(here.parameters, mixed, strict=True):
        assert torch.equal(own.detach(), before - 0.5)


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
        here.train([torch.ones(4)])
        given.append(store.encode(0))
        given[-1].release()
    assert bytes(first.source.view) == bytes(16), "a sender still holds a reference"
    assert torch.frombuffer(bytearray(given[-1].source.view), dtype=torch.float32).tolist() == [-2.5] * 4
    if storages.raw_pulls:
        memory = {id(one.source.view.obj) for one in given}
        assert len(memory) == 1 and id(first.source.view.obj) not in memory
        first.release()
        here.train([torch.ones(4)])
        assert store.encode(0).source.view.obj is first.source.view.obj or len(store._spare._free[16]) == 1


def test_buffers_of_pushes_are_reused() -> None:
    here = side([torch.zeros(4)], servers=1)
    for _ in range(20):
        here.train([torch.ones(4)])
    assert {size: len(free) for size, free in here.table_store._spare._free.items()} == {16: 1}


# --- optimizers -------------------------------------------------------------------------------------------


def two_groups(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> OptimizerOf:
    """Every other table has half the learning rate."""

    def made(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        rows = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": options["lr"] / 2}]
        return kind(rows, **options)

    return made


def follows(here: Side, make: OptimizerOf, schedule: Callable[[dict[str, Any], int], None]) -> None:
    """Check that five steps of the shards, by a schedule of the groups' settings, are those of an optimizer alone."""
    alone = [nn.Parameter(one) for one in values(torch.float64)]
    optimizer = make(alone)
    for step in range(5):
        for group in (*optimizer.param_groups, *here.optimizer.param_groups):
            schedule(group, step)
        gradients = values(torch.float64, seed=10 + step)
        for own, gradient in zip(alone, gradients, strict=True):
            own.grad = gradient
        optimizer.step()
        here.train(gradients)
    here.pull()
    for one, two in zip(here.parameters, alone, strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-12, atol=1e-12)


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
    def schedule(group: dict[str, Any], step: int) -> None:
        group["lr"] *= 0.9

    make = OPTIMIZERS[name]
    follows(side(values(torch.float64), place, 3, make), make, schedule)


def test_a_schedule_may_change_settings_of_several_numbers() -> None:
    """OneCycleLR cycles Adam's betas."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.1)

    def schedule(group: dict[str, Any], step: int) -> None:
        group["betas"] = (0.5 + step / 10, 0.9)

    follows(side(values(torch.float64), optimizer=make), make, schedule)


def test_settings_arrive_with_their_types() -> None:
    """Muon counts its steps, so ns_steps must not become a float."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["ns_steps"] = 5
    (group,) = group_settings(optimizer)
    sent = metadata_of(GradientRequest(0, 0, 1, 0, (), (group,), 5.0))
    (arrived,) = message_of(kind_of(GradientRequest), sent).settings
    assert type(arrived["ns_steps"]) is int and arrived["betas"] == (0.9, 0.999)
    assert arrived == group


class Norm(torch.optim.Optimizer):
    """Takes steps of length lr in each tensor, so it needs the whole tensor."""

    def __init__(self, parameters: Any, lr: float = 0.5):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data -= group["lr"] * one.grad / one.grad.norm()


def test_an_optimizer_that_needs_whole_tensors() -> None:
    """It is refused if the placement cuts a tensor; otherwise it receives each tensor alone, in its shape."""
    with pytest.raises(UsageError, match="Norm needs whole tensors, which this placement cuts: give --placement heur"):
        side([torch.ones(3, 4), torch.ones(4)], "uniform", 2, Norm)
    here = side([torch.zeros(3, 4), torch.zeros(4)], "heuristic", 1, Norm, least=10**6)
    here.train([torch.full((3, 4), 2.0), torch.full((4,), 5.0)])
    here.pull()
    torch.testing.assert_close(here.parameters[0].detach(), torch.full((3, 4), -0.5 / 12**0.5))
    torch.testing.assert_close(here.parameters[1].detach(), torch.full((4,), -0.25))


def test_an_optimizer_that_cannot_be_constructed_is_refused() -> None:
    class Needs(Norm):
        def __init__(self, parameters: Any, what: str):
            super().__init__(parameters)

    with pytest.raises(UsageError, match="Needs cannot be constructed for a server's tables"):
        side([torch.ones(4)], "heuristic", 1, lambda parameters: Needs(parameters, "this"))


def test_hyperparameters_that_are_no_settings_of_groups_reach_the_servers() -> None:
    class Scaled(Norm):
        def __init__(self, parameters: Any, scale: float = 1.0):
            self.scale, self.signs = scale, (1, 1)
            super().__init__(parameters)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for one in self.param_groups[0]["params"]:
                one.data -= self.scale * self.signs[1] * one.grad

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = Scaled(parameters, scale=0.25)
        made.signs = (1, -1)
        return made

    here = side([torch.zeros(4)], "heuristic", 1, make)
    here.train([torch.ones(4)])
    here.pull()
    torch.testing.assert_close(here.parameters[0].detach(), torch.full((4,), 0.25))


# --- the gradient buffer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_buffer_is_applied_as_the_mean_of_each_bucket(dtype: torch.dtype) -> None:
    """A bucket with two pushes is divided by two, one with three by three; then all are empty."""
    here = side([torch.zeros(4, dtype=dtype), torch.zeros(4, dtype=dtype)], "range", 1, least=0)
    for number, only_first in enumerate((False, False, True)):
        here.update([torch.full((4,), 2.0**number, dtype=dtype), torch.full((4,), -2.0, dtype=dtype)])
        here.whole = [place for place in here.whole if place == (0, 0) or not only_first]
        here.push(buffered=True)
    here.table_store.apply_buffer(0)
    here.pull()
    expected = torch.tensor(-0.5 * (1 + 2 + 4) / 3, dtype=dtype)
    assert here.parameters[0].tolist() == [float(expected)] * 4 and here.parameters[1].tolist() == [1.0] * 4
    here.table_store.apply_buffer(0)  # the buffer is empty
    here.pull()
    assert here.parameters[0].tolist() == [float(expected)] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_kept_in_float32_and_sent_in_16(dtype: torch.dtype) -> None:
    here = side([torch.ones(4, dtype=dtype)], servers=1, optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-16))
    assert here.table_store.encode(RequestedBucket(0, 0)).parts == ((0, 8),)
    for _ in range(2**10):
        here.train([torch.ones(4, dtype=dtype)])
    here.pull()
    assert here.parameters[0].tolist() == [1 - 2.0**-6] * 4


# --- the state that parts keep between iterations, in checkpoints ---------------------------------


class Half(TransmitBuffer):
    """Sends half of its values, and keeps the other half."""

    def add(self, gradient: Tensor) -> None:
        self.data += gradient

    def encode(self) -> bytes:
        self.data /= 2
        return bytes(raw(self.data))

    def state_dict(self) -> Tensor:
        return self.data

    def load_state_dict(self, state: Tensor) -> None:
        self.data.copy_(state)


class Counting(ServerStorage):
    """Counts the gradients that it receives."""

    count = 0

    def decode(self, encoded: memoryview) -> Tensor:
        self.count += 1
        return super().decode(encoded)

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, state: int) -> None:
        self.count = state


KEEPING = Storages(transmit=Half, server=Counting)


def made(storages: Storages = KEEPING) -> Side:
    return side([torch.zeros(8), torch.zeros(5)], storages=storages)


def iteration(here: Side) -> None:
    here.train([torch.ones(8), torch.ones(5)])


def counts(here: Side) -> list[list[int]]:
    """Return the states of the shards' parts, as written to checkpoints."""
    states = (here.table_store.state_dict(shard)["store"]["parts"] for shard in here.stores)
    return [[state for state in parts if state is not None] for parts in states]


def resumed(cut: Side, storages: Storages = KEEPING) -> Side:
    """Return a side with the state of ``cut``, which is not used any more."""
    again = made(storages)
    again.client.load_state_dict(cut.saved())
    for shard in cut.stores:
        again.table_store.load_state_dict(shard, cut.table_store.state_dict(shard))
    return again


def test_the_state_of_parts_is_restored() -> None:
    whole, cut = made(), made()
    for one in (whole, cut):
        iteration(one)
        iteration(one)
    again = resumed(cut)
    assert counts(cut) == counts(again) == [[2, 2]] * 2, "one gradient per table and iteration"
    for one in (whole, again):
        iteration(one)
        one.pull()
    assert all(map(torch.equal, whole.parameters, again.parameters))
    assert counts(whole) == counts(again) == [[3, 3]] * 2


def test_gradients_that_wait_to_be_sent_count_as_sent() -> None:
    """The matching checkpoint of a shard includes all gradients of the iteration."""
    here = made()
    here.update([torch.ones(8), torch.ones(5)])
    before = here.saved()
    halves = [state for state in before["states"] if state is not None]
    assert sorted(map(len, halves)) == [2, 3, 4, 4] and all(bool((half == 0.5).all()) for half in halves)
    here.push()
    here.pull()
    assert here.parameters[0].tolist() == [-0.25] * 8, "half of the gradient, at a rate of a half: encoded once"


def test_parts_without_state_write_nothing() -> None:
    for storages in (Storages(), CODED):
        here = made(storages)
        iteration(here)
        assert here.client.state_dict() is None


def test_the_state_of_other_parts_is_refused() -> None:
    worker = made().saved()
    with pytest.raises(UsageError, match="saved with the parts: transmit Half, server Counting, and this run has: "):
        made(dataclasses.replace(KEEPING, transmit=TransmitBuffer)).client.load_state_dict(worker)
    with pytest.raises(ValueError, match="longer"):
        side([torch.zeros(8)], storages=KEEPING).client.load_state_dict(worker)


@pytest.mark.parametrize("storages", [Storages(), KEEPING])
def test_gradients_that_gather_are_in_checkpoints(storages: Storages) -> None:
    """They are neither encoded nor lost: the next push carries the sum of both iterations."""
    whole, cut = made(storages), made(storages)
    for one in (whole, cut):
        iteration(one)
        one.update([torch.ones(8), torch.ones(5)])
        one.client.gather()
    assert any(isinstance(state, Tensor) for state in cut.saved()["states"])
    again = resumed(cut, storages)
    for one in (whole, again):
        iteration(one)
        iteration(one)
        one.pull()
    assert all(map(torch.equal, whole.parameters, again.parameters))
    if storages == Storages():
        assert whole.parameters[0].tolist() == [-0.5 * 4] * 8, "four iterations, and the last one is sent once"
        assert whole.client.state_dict() is None
