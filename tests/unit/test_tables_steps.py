"""A shard's steps: supported optimizers, the gradient buffer, and 16-bit tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table_sides import CODED, OptimizerOf, Side, side, values
from torch import Tensor, nn

from gossipx.errors import UsageError
from gossipx.protocol.effects import RequestedBucket
from gossipx.protocol.fields import kind_of
from gossipx.protocol.server_messages import GradientRequest
from gossipx.tables.coding import group_settings
from gossipx.tables.parts import ServerStorage, Storages, TransmitBuffer, raw
from gossipx.wire.frames import message_of, metadata_of

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
        here.update(gradients)
        here.push()
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
    with pytest.raises(UsageError, match="Norm needs whole tensors, which this placement cuts: use heuristic"):
        side([torch.ones(3, 4), torch.ones(4)], "uniform", 2, Norm)
    here = side([torch.zeros(3, 4), torch.zeros(4)], "heuristic", 1, Norm, least=10**6)
    here.update([torch.full((3, 4), 2.0), torch.full((4,), 5.0)])
    here.push()
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
    here.update([torch.ones(4)])
    here.push()
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


def test_a_share_of_a_gradient() -> None:
    here = side([torch.zeros(4)], servers=1)
    here.update([torch.full((4,), 2.0)])
    here.push(scale=0.25)
    here.pull()
    assert here.parameters[0].tolist() == [-0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_kept_in_float32_and_sent_in_16(dtype: torch.dtype) -> None:
    here = side([torch.ones(4, dtype=dtype)], servers=1, optimizer=lambda p: torch.optim.SGD(p, lr=2.0**-16))
    assert here.table_store.encode(RequestedBucket(0, 0)).parts == ((0, 8),)
    for _ in range(2**10):
        here.update([torch.ones(4, dtype=dtype)])
        here.push()
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
    here.update([torch.ones(8), torch.ones(5)])
    here.push()


def states(here: Side) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the states of the worker and of the shards, as written to checkpoints."""
    worker = here.client.state_dict()
    shards = [here.table_store.state_dict(shard) for shard in here.stores]
    return None if worker is None else {**worker, "states": [copied(one) for one in worker["states"]]}, shards


def copied(state: object) -> object:
    return state.clone() if isinstance(state, Tensor) else state


def test_the_state_of_parts_is_restored() -> None:
    whole, cut = made(), made()
    for one in (whole, cut):
        iteration(one)
        iteration(one)
    worker, shards = states(cut)
    assert worker is not None
    again = made()
    again.client.load_state_dict(worker)
    for shard, state in enumerate(shards):
        again.table_store.load_state_dict(shard, state)
        counts = [state for state in state["store"]["parts"] if state is not None]
        assert counts == [2, 2], "one gradient per table and iteration"
    for one in (whole, again):
        iteration(one)
        one.pull()
    assert all(map(torch.equal, whole.parameters, again.parameters))
    assert states(whole)[1][0]["store"]["parts"] == states(again)[1][0]["store"]["parts"]


def test_gradients_that_wait_to_be_sent_count_as_sent() -> None:
    """The matching checkpoint of a shard includes all gradients of the iteration."""
    here = made()
    here.update([torch.ones(8), torch.ones(5)])
    before = here.client.state_dict()
    assert before is not None
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
    worker, _ = states(made())
    assert worker is not None
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
    worker, shards = states(cut)
    assert worker is not None and any(isinstance(state, Tensor) for state in worker["states"])
    again = made(storages)
    again.client.load_state_dict(worker)
    for shard, state in enumerate(shards):
        again.table_store.load_state_dict(shard, state)
    for one in (whole, again):
        iteration(one)
        iteration(one)
        one.pull()
    assert all(map(torch.equal, whole.parameters, again.parameters))
    if storages == Storages():
        assert whole.parameters[0].tolist() == [-0.5 * 4] * 8, "four iterations, and the last one is sent once"
        assert whole.client.state_dict() is None
