"""Training loops under torch.compile: the model, the optimizer's step, and a function around both.

Row 75 of the table of faults. A compiler cannot trace what gossipx does in hooks: flat buffers, threads and sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from served_loops import STEPS, Join, batch, loop, loss_of, net, plain, same, sgd
from torch import nn

from gossipx.runtime.training.peer import Peer

pytestmark = pytest.mark.fault(75)
Loop = Callable[[nn.Module, torch.optim.Optimizer, Peer | None], None]
MODES: dict[str, dict[str, Any]] = {
    "gossip": {"mode": "pull", "servers": None, "policy": "tau:2"},
    "wait-free": {},
    "at-step": {"wait_free": False},
}


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled_model(model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer | None) -> None:
    loop(torch.compile(model, backend="eager"), optimizer, plain)


def compiled_step(model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer | None) -> None:
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        step()


def compiled_around_both(model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer | None) -> None:
    @torch.compile(backend="eager")
    def iteration(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    for number in range(STEPS):
        iteration(batch(number))


def after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer, peer: Peer | None) -> None:
    """Without an optimizer that gossipx knows, the loop calls ``peer.step()`` itself; here the compiler meets it."""

    @torch.compile(backend="eager")
    def iteration(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        if peer is not None:
            peer.step()

    for number in range(STEPS):
        iteration(batch(number))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train", [compiled_model, compiled_step, compiled_around_both, after_the_step])
def test_a_compiled_loop_ends_with_the_same_model(join: Join, train: Loop, mode: str) -> None:
    if train is after_the_step and mode != "gossip":
        pytest.skip("with servers the optimizer is given to join")
    alone = net()
    train(alone, sgd(alone), None)
    torch.compiler.reset()
    model = net()
    optimizer = sgd(model)
    peer = join(model, None if train is after_the_step else optimizer, **MODES[mode])  # type: ignore[arg-type]
    train(model, optimizer, peer)
    peer.sync()
    assert peer.iteration == STEPS
    same(model, alone)
