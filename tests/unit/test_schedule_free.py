"""The second set of weights of schedule-free optimizers, as buffers of the module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gossipx.errors import UsageError
from gossipx.runtime.training import schedule_free

schedulefree = pytest.importorskip("schedulefree")
KINDS: dict[str, dict[str, Any]] = {
    "SGDScheduleFree": {"lr": 0.1},
    "AdamWScheduleFree": {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2},
    "RAdamScheduleFree": {"lr": 0.01, "foreach": False},
}


def made(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = getattr(schedulefree, kind)(module.parameters(), **KINDS[kind])
    return module, optimizer


def train(module: nn.Module, optimizer: Any, steps: int) -> list[float]:
    optimizer.train()
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.randn(5, 3, generator=draw)).square().mean().backward()
        optimizer.step()
    optimizer.eval()
    return [value.item() for parameter in module.parameters() for value in parameter.flatten()]


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_bit_by_bit(kind: str) -> None:
    plain, prepared = made(kind), made(kind)
    averages = schedule_free.of(prepared[0], prepared[1:], has_servers=False)
    assert averages is not None
    assert train(*plain, 5) == train(*prepared, 5)
    assert [*prepared[0].state_dict()] == [*plain[0].state_dict()]
    state = next(iter(prepared[1].state.values()))
    assert next(prepared[0].buffers()) is state["z"]
    averages.close()
    assert not list(prepared[0].buffers())


def test_a_loaded_state_is_in_the_buffers_again() -> None:
    module, optimizer = made("AdamWScheduleFree")
    schedule_free.of(module, [optimizer], has_servers=False)
    train(module, optimizer, 3)
    kept = copy.deepcopy(optimizer.state_dict())
    train(module, optimizer, 3)
    optimizer.load_state_dict(kept)
    buffers, loaded = list(module.buffers()), list(kept["state"].values())
    assert len(buffers) == 4
    for buffer, state, parameter in zip(buffers, loaded, module.parameters(), strict=True):
        assert torch.equal(buffer, state["z"]) and optimizer.state[parameter]["z"] is buffer


def test_a_state_from_earlier_training_stays() -> None:
    module, optimizer = made("SGDScheduleFree")
    train(module, optimizer, 3)
    before = [state["z"].clone() for state in optimizer.state.values()]
    schedule_free.of(module, [optimizer], has_servers=False)
    for buffer, z in zip(module.buffers(), before, strict=True):
        assert torch.equal(buffer, z)


def test_other_optimizers_need_nothing_and_servers_are_refused() -> None:
    module, optimizer = made("SGDScheduleFree")
    assert schedule_free.of(module, [torch.optim.SGD(module.parameters())], has_servers=True) is None
    assert schedule_free.of(module, [], has_servers=True) is None
    with pytest.raises(UsageError, match="SGDScheduleFree cannot train on servers"):
        schedule_free.of(module, [optimizer], has_servers=True)
