"""The watch on updates that are not counted as iterations, without a network. Row 48 of the table of faults."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gossipx.runtime.optimizers import Optimizers
from gossipx.runtime.training.step_watch import PATIENCE, USUAL, StepWatch

pytestmark = pytest.mark.fault(48)


class Loop:
    """A training loop whose joined optimizer's steps are iterations, as with a peer."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.iteration = 0
        self.optimizers = Optimizers(self.model, None)
        self.watch = StepWatch(self.model, self.optimizers)
        self.optimizers.count(self.step)

    def join(self, *optimizers: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self.optimizers.replace(optimizers)
        self.watch.optimizers_replaced()
        return optimizers[0]

    def close(self) -> None:
        self.watch.close()
        self.optimizers.close()

    def step(self) -> None:
        self.iteration += 1
        self.watch.iteration_done(self.iteration)

    def backward(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = (self.model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward()
        return loss

    def descend(self, write: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Update the model without an optimizer."""
        self.backward()
        for parameter in self.model.parameters():
            write(parameter, 0.01 * parameter.grad)

    def train(self, optimizer: torch.optim.Optimizer, updates: int, closure: bool = False) -> None:
        for _ in range(updates):
            if closure:
                optimizer.step(self.backward)
            else:
                self.backward()
                optimizer.step()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS])
def test_another_optimizer_from_some_iteration_on_is_told_once(loop: Loop, caplog: Any, kind: Any) -> None:
    loop.train(loop.join(torch.optim.Adam(loop.model.parameters())), 40)
    assert caplog.messages == []
    loop.train(kind(loop.model.parameters(), lr=0.01), 2 * PATIENCE, closure=True)
    (line,) = caplog.messages
    assert line.startswith("the model changes without the joined optimizer's step: 20 updates")
    assert " since iteration 40; call peer.step() after each, or join the optimizer that steps: peer.join_op" in line
    assert loop.iteration == 40


def subtracts(parameter: torch.Tensor, change: torch.Tensor) -> None:
    parameter.data.sub_(change)


def assigns(parameter: torch.Tensor, change: torch.Tensor) -> None:
    parameter.data = parameter.data - change


@pytest.mark.parametrize("write", [subtracts, assigns])
def test_updates_through_data_are_told(loop: Loop, caplog: Any, write: Callable[..., None]) -> None:
    """They do not change torch's version counter. What is written at an iteration, such as by a mix, does not count."""
    optimizer = loop.join(sgd(loop.model))
    for _ in range(2 * PATIENCE):
        loop.train(optimizer, 1)
        for parameter in loop.model.parameters():
            write(parameter, torch.tensor(1e-3))
    assert caplog.messages == []
    for _ in range(2 * PATIENCE):
        loop.descend(write)
    (line,) = caplog.messages
    assert line.startswith("the model changes without the joined optimizer's step: 20 updates since iteration 40; ")


def test_updates_through_data_that_are_usual_are_not_told(loop: Loop, caplog: Any) -> None:
    """As many as in a loop that calls ``peer.step()`` after each fifth."""
    for number in range(5 * PATIENCE):
        loop.descend(subtracts)
        if number % 5 == 4:
            loop.step()
    loop.watch.training_ended()
    assert caplog.messages == []


@pytest.mark.parametrize("joined", [False, True])
def test_updates_without_any_optimizer_are_told(loop: Loop, caplog: Any, joined: bool) -> None:
    if joined:
        loop.join(sgd(loop.model))
    for _ in range(PATIENCE + 1):
        loop.backward()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter -= 0.01 * parameter.grad
    (line,) = caplog.messages
    whose = "the joined optimizer's step" if joined else "peer.step()"
    assert line.startswith(f"the model changes without {whose}: 20 updates since iteration 0; ")


def test_a_wrapper_that_steps_another_optimizer_is_told(loop: Loop, caplog: Any) -> None:
    optimizer = loop.join(sgd(loop.model))
    wrapped = copy.deepcopy(optimizer)  # of the same class, over copies: it trains nothing of the model
    loop.train(wrapped, 2 * PATIENCE)
    assert caplog.messages == []
    wrapped.param_groups[0]["params"] = optimizer.param_groups[0]["params"]
    loop.train(wrapped, PATIENCE)
    assert len(caplog.messages) == 1 and "20 updates by SGD since" in caplog.messages[0]


def test_the_optimizer_that_is_joined_later_counts(loop: Loop, caplog: Any) -> None:
    loop.train(loop.join(torch.optim.Adam(loop.model.parameters())), 10)
    loop.train(loop.join(sgd(loop.model)), 2 * PATIENCE)
    assert caplog.messages == [] and loop.iteration == 10 + 2 * PATIENCE


@pytest.mark.parametrize("between", [0, 1])
def test_a_few_updates_at_the_end_are_told_then_if_there_were_none_before(
    loop: Loop, caplog: Any, between: int
) -> None:
    joined, other = loop.join(sgd(loop.model)), torch.optim.Adam(loop.model.parameters())
    for _ in range(PATIENCE):
        loop.train(other, between)
        loop.train(joined, 1)
    loop.train(other, PATIENCE - 1)
    assert caplog.messages == []
    loop.watch.training_ended()
    expected = [] if between else ["the model changes without the joined optimizer's step: 19 updates by Adam since"]
    assert [line[: len(start)] for line, start in zip(caplog.messages, expected, strict=True)] == expected


def test_values_that_are_loaded_at_the_end_are_not_told(loop: Loop, caplog: Any) -> None:
    """Such as averaged weights, also if an attack on them computes gradients."""
    loop.train(loop.join(sgd(loop.model)), PATIENCE)
    loop.model.load_state_dict(copy.deepcopy(loop.model.state_dict()))
    for _ in range(PATIENCE):
        loop.backward()
    loop.watch.training_ended()
    assert caplog.messages == []


def test_an_optimizer_of_another_model_is_not_told(loop: Loop, caplog: Any) -> None:
    """Such as a GAN's discriminator that is not joined."""
    discriminator = nn.Linear(1, 1)
    optimizer = sgd(discriminator)
    for _ in range(4 * PATIENCE):
        discriminator(loop.model(torch.randn(8, 4))).mean().backward()
        optimizer.step()
    assert caplog.messages == []


def test_loops_that_update_more_often_than_they_count_are_not_told(loop: Loop, caplog: Any) -> None:
    """Five updates of a critic in the same module per iteration, and then a longer round of them."""
    joined, critic = loop.join(sgd(loop.model[0])), sgd(loop.model[2])
    for _ in range(PATIENCE):
        loop.train(critic, 5)
        loop.train(joined, 1)
    loop.train(critic, 3 * 5 + PATIENCE - 1)
    assert caplog.messages == []
    loop.train(critic, 1)
    assert len(caplog.messages) == 1


def test_the_steps_of_one_iteration_are_not_told(loop: Loop, caplog: Any) -> None:
    """LBFGS changes the parameters for each of its evaluations; with gradient accumulation nothing changes."""
    loop.train(loop.join(torch.optim.LBFGS(loop.model.parameters(), lr=0.1, max_iter=100)), 5, closure=True)
    optimizer = loop.join(sgd(loop.model))
    for _ in range(2):
        for _ in range(2 * PATIENCE):
            (loop.model(torch.randn(8, 4)) - 1).square().mean().backward()
        optimizer.step()
    assert caplog.messages == []


def test_a_loop_that_calls_step_itself_is_not_told(loop: Loop, caplog: Any) -> None:
    optimizer = sgd(loop.model)
    for _ in range(2 * PATIENCE):
        loop.train(optimizer, 1)
        loop.step()
    assert caplog.messages == []


def test_nothing_is_left_behind(caplog: Any) -> None:
    """No hook on the model, its optimizer or torch; and a joined model can be copied and saved as before."""
    loop = Loop()
    optimizer = loop.join(sgd(loop.model))
    copied = copy.deepcopy(loop.model)
    (copied(torch.randn(8, 4)) - 1).square().mean().backward()
    loop.close()
    loop.train(optimizer, 4 * PATIENCE)
    assert caplog.messages == [] and loop.iteration == 0
    watch = weakref.ref(loop.watch)
    del loop
    gc.collect()
    assert watch() is None and not optimizer._optimizer_step_post_hooks


@pytest.mark.fault(83)
def test_one_of_several_optimizers_that_does_not_step_is_told(loop: Loop, caplog: Any) -> None:
    """Each joined optimizer has to step for an iteration; a critic that steps more often than the other is usual."""
    critic, generator = sgd(loop.model[0]), torch.optim.Adam(loop.model[2].parameters())
    loop.join(critic, generator)
    for _ in range(PATIENCE):
        loop.train(critic, 5)
        loop.train(generator, 1)
    assert loop.iteration == PATIENCE and caplog.messages == []
    loop.train(critic, 2 * (5 * USUAL + PATIENCE))
    (line,) = caplog.messages
    assert line.startswith("the model changes without a step of Adam, and an iteration needs one of each joined")
    assert line.endswith(" by SGD since iteration 20; join only those that step: peer.join_optimizer([...])")
    loop.train(loop.join(critic), 3)
    assert loop.iteration == PATIENCE + 3
