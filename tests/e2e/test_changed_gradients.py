"""Loops that change gradients between backward and the optimizer's step, with a parameter server.

By default gradients are sent during backward, before such a change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from seeds import some
from served_loops import STEPS, Join, Step, batch, loop, loss_of, net, plain, same, served, sgd
from torch import Tensor, nn

from gossipx.errors import UsageError

pytestmark = pytest.mark.fault(46)

Change = Callable[[nn.Module], None]


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def changing(change: Change) -> Step:
    """Return a step that changes the gradients after backward."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        change(model)
        optimizer.step()

    return step


def clips_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clamps_data(model: nn.Module) -> None:
    """Clip as old scripts do; it does not change the gradients' version counters."""
    for gradient in gradients(model):
        gradient.data.clamp_(-0.01, 0.01)


def adds_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(int(1e6 * gradients(model)[0].abs().sum()) % 1000)
    for gradient in gradients(model):
        gradient += 0.1 * torch.randn(gradient.shape, generator=generator)


def replaces(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5


def removes(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def replaces_one_by_zeros(model: nn.Module) -> None:
    last = list(model.parameters())[-1]
    last.grad = torch.zeros_like(last)


@pytest.mark.parametrize("change", [clips_norm, clamps_data, adds_noise, replaces, replaces_one_by_zeros])
def test_changed_gradients_are_what_is_pushed(join: Join, caplog: pytest.LogCaptureFixture, change: Change) -> None:
    step = changing(change)
    same(served(join, net(), step), loop(alone := net(), sgd(alone), step))
    told = [record.getMessage() for record in caplog.records if "--no-wait-free" in record.getMessage()]
    assert len(told) == 1 and "\n" not in told[0] and "was changed after backward" in told[0]


def test_a_loop_that_changes_nothing_sends_during_backward_from_its_second_iteration(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with join(model, optimizer := sgd(model)) as peer:
        sent = []
        assert peer._backward is not None
        update = peer._backward._client.update
        peer._backward._client.update = lambda table, gradient: [sent.append(table), update(table, gradient)][1]  # type: ignore[method-assign, func-returns-value]
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(number)).backward()
            assert len(sent) == 4 * number + (4 if number else 0)
            optimizer.step()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@torch.no_grad()
def clamps(model: nn.Module) -> None:
    next(model.parameters()).clamp_(-0.1, 0.1)


def clamps_data_of_weights(model: nn.Module) -> None:
    """Clip weights as a Wasserstein GAN does; this does not change their version counters."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def halves_one(model: nn.Module) -> None:
    [*model.parameters()][2].data.mul_(0.5)


def loads_averages(model: nn.Module) -> None:
    """Load averaged weights for an evaluation, and then restore the trained ones."""
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(torch.zeros(()))
    with torch.no_grad():
        model(batch(0))
    for parameter, values in zip(model.parameters(), trained, strict=True):
        parameter.data.copy_(values)


# Without wait-free backpropagation the model is up to date, so nothing replaces the averages.
@pytest.mark.parametrize(
    ("write", "wait_free"),
    [
        (clamps, False),
        *((write, True) for write in (clamps, clamps_data_of_weights, halves_one, loads_averages)),
    ],
)
def test_values_that_a_loop_writes_itself_are_told_to_be_replaced(
    join: Join, caplog: pytest.LogCaptureFixture, write: Change, wait_free: bool
) -> None:
    """The servers hold the model, so a limit on weights, for example, has no effect."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        plain(model, optimizer, number)
        write(model)

    served(join, net(), step, wait_free=wait_free)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    table = "'2.weight'" if write is halves_one else "'0."
    assert len(said) == 1 and f"the loop has written to {table}" in said[0] and " itself, or moved it" in said[0]


def test_an_optimizer_that_steps_during_backward_is_refused(join: Join) -> None:
    model = net()
    inner = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        inner[parameter].step()  # type: ignore[index]
        inner[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    with join(model, optimizer := sgd(model)) as peer:
        with pytest.raises(
            UsageError, match=r"has no gradient after backward.*let the optimizer given to gossipx.join"
        ):
            plain(model, optimizer, 0)
        peer.close()


# --- GradScaler -------------------------------------------------------------------------------------------


def scaling(clips: bool = False, infinite_at: tuple[int, ...] = (), init_scale: float = 1024.0) -> Step:
    """Return a step with mixed precision's GradScaler, whose loss overflows at some steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch(number)) * (float("inf") if number in infinite_at else 1.0)
        scaler.scale(loss).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("infinite_at", some([(), (0,), (0, 1, 2), (3, 5)], (0, 1, 2), (3, 5)))
@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler(join: Join, clips: bool, infinite_at: tuple[int, ...]) -> None:
    model, steps = net(), 9
    with join(model, optimizer := sgd(model)) as peer:
        loop(model, optimizer, scaling(clips, infinite_at), steps)
        assert peer.iteration == steps - len(infinite_at)
    same(model, loop(alone := net(), sgd(alone), scaling(clips, infinite_at), steps))


@pytest.mark.parametrize("wait_free", some([True, False], True))
@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler_with_a_fused_optimizer(join: Join, kind: str, clips: bool, wait_free: bool) -> None:
    """Such an optimizer unscales within its own step, which the servers make."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "adam":
            return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    # After a skipped first step, torch's fused SGD begins with a momentum that it has not initialized.
    model, skipped = net(), (0, 4) if kind == "adam" else (2, 4)
    with join(model, optimizer := made(model), wait_free=wait_free) as peer:
        loop(model, optimizer, scaling(clips, skipped), 8)
        assert peer.iteration == 6
    same(model, loop(alone := net(), made(alone), scaling(clips, skipped), 8), rtol=1e-5, atol=1e-6)


# --- changes that begin later, or that happen elsewhere -----------------------------------------------------


LATER = [*map(changing, (clips_norm, clamps_data, replaces, removes)), scaling()]


@pytest.mark.parametrize("step", LATER)
def test_a_change_that_begins_after_gradients_were_sent_is_refused_and_names_the_option(join: Join, step: Step) -> None:
    model = net()
    with join(model, optimizer := sgd(model)) as peer:
        loop(model, optimizer, plain, 2)
        with pytest.raises(
            UsageError, match=r"gradient of '\d\.\w+' was changed after it was sent.*--no-wait-free"
        ) as e:
            step(model, optimizer, 2)
        assert "\n" not in str(e.value)
        peer.close()


def test_a_clip_that_begins_later_and_changes_nothing_yet_switches_in_time(
    join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, batch(number)).backward()
        if number >= 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1e9 if number == 2 else 0.05)
        optimizer.step()

    same(served(join, net(), step), loop(alone := net(), sgd(alone), step))
    assert sum("--no-wait-free" in record.getMessage() for record in caplog.records) == 1


def accumulates(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for part in batch(number).chunk(4):
        (loss_of(model, part) / 4).backward()
    optimizer.step()


def closes(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Make a step whose closure is called before its gradients are pushed."""

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, batch(number))
        loss.backward()
        clips_norm(model)
        losses.append(loss.item())
        return loss.item()

    losses: list[float] = []
    assert optimizer.step(closure) == losses[0] and len(losses) == 1


@pytest.mark.parametrize("step", [accumulates, closes])
def test_gradients_of_several_passes_or_of_a_closure(join: Join, step: Step) -> None:
    same(served(join, net(), step), loop(alone := net(), sgd(alone), step))


def test_a_gradient_of_an_earlier_backward_pass_only(join: Join) -> None:
    """The last pass does not use the first layer, whose gradient was accumulated before."""
    model = net()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        assert isinstance(model, nn.Sequential)
        with peer.no_sync() if model is joined else torch.enable_grad():
            loss_of(model, batch(number)).backward()
        hidden = torch.tanh(batch(number, 16).view(8, 8)).repeat(1, 2)
        (model[2](hidden) - 1).square().mean().backward()
        optimizer.step()

    joined = model
    with join(model, optimizer := sgd(model)) as peer:
        loop(model, optimizer, step)
    same(model, loop(alone := net(), sgd(alone), step))


def clip_in_hook(optimizer: torch.optim.Optimizer) -> None:
    def clip(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 0.05)

    optimizer.register_step_pre_hook(clip)


def test_a_step_hook_that_clips(join: Join) -> None:
    model = net()
    clip_in_hook(optimizer := sgd(model))
    with join(model, optimizer):
        loop(model, optimizer, plain)
    alone = net()
    clip_in_hook(optimizer := sgd(alone))
    same(model, loop(alone, optimizer, plain))


def test_a_step_hook_that_would_see_no_gradients_is_refused(join: Join) -> None:
    model = net()
    with join(model, optimizer := sgd(model)) as peer:
        clip_in_hook(optimizer)
        with pytest.raises(UsageError, match=r"before gossipx\.join"):
            plain(model, optimizer, 0)
        peer.close()


def test_a_hook_on_parameters_that_clips_during_backward(join: Join) -> None:
    """Without gossipx it runs before the step; with gossipx it may run after the gradient was taken."""

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    def clipping(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clip)  # type: ignore[no-untyped-call]
        return model

    model = net()
    with join(model, optimizer := sgd(model)):
        loop(clipping(model), optimizer, plain, STEPS)
    same(model, loop(alone := clipping(net()), sgd(alone), plain))


# --- solvers ------------------------------------------------------------------------------------------------
