"""The state that parts keep between iterations, in checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from table_sides import CODED, Side, side
from torch import Tensor

from gossipx.errors import UsageError
from gossipx.tables.parts import ServerStorage, Storages, TransmitBuffer, raw


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
