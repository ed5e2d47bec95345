"""Torch training loops in server mode, compared with the same loops without gossipx: one peer is its own server.

With one worker under bsp the server makes the same steps as the loop's own optimizer.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from seeds import some
from served_loops import EACH_ALONE, STEPS, Join, Step, batch, loop, loss_of, net, plain, same, served, sgd, with_zeros
from torch import Tensor, nn
from torch.nn import functional

from gossipx.errors import UsageError
from gossipx.protocol.effects import Effect
from gossipx.protocol.events import Received
from gossipx.protocol.server_messages import GradientRequest, TablesRequest
from gossipx.runtime.training.peer import Peer
from gossipx.server.mode import ServerMode
from gossipx.server.shard import Shard
from gossipx.server.shard_clock import PushDecision

LONG = 20.0  # seconds: timeout of waits
WAIT_FREE = [True, False]


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make a step, after which gradients are the loop's, and evaluate the model before the next one."""
    plain(model, optimizer, step)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        model.eval()
        model(batch(1000 + step))
        model.train()


def keeping(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, batch(step)).backward()
    optimizer.step()


def directly(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Use a layer's parameters outside the layer."""
    optimizer.zero_grad()
    assert isinstance(model, nn.Sequential)
    hidden = torch.tanh(model[0](batch(step)))
    (hidden @ model[2].weight.T + model[2].bias - 1).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("wait_free", WAIT_FREE)
@pytest.mark.parametrize("step", [plain, evaluating, keeping, directly])
def test_loops_with_the_same_result_as_without_gossipx(join: Join, step: Step, wait_free: bool) -> None:
    alone = loop(model := net(), sgd(model), step)
    same(served(join, net(), step, wait_free=wait_free), alone)


@pytest.mark.parametrize("bucket", [0, 2**20])
@pytest.mark.parametrize("step", [plain, evaluating])
def test_wait_free_changes_no_bit(join: Join, step: Step, bucket: int) -> None:
    free = served(join, net(), step, bucket=bucket)
    same(served(join, net(), step, bucket=bucket, wait_free=False), free, rtol=0, atol=0)


@pytest.mark.parametrize("wait_free", WAIT_FREE)
def test_accumulation_is_one_big_batch(join: Join, wait_free: bool) -> None:
    model = net()
    with join(model, optimizer := sgd(model), wait_free=wait_free) as peer:
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = batch(step).chunk(4)
            with peer.no_sync():
                for part in parts[:-1]:
                    (loss_of(model, part) / 4).backward()
            (loss_of(model, parts[-1]) / 4).backward()
            optimizer.step()
    same(model, loop(alone := net(), sgd(alone), plain), rtol=1e-5, atol=1e-6)


def test_two_backward_passes_without_no_sync_are_refused(join: Join) -> None:
    """If the first iteration has them, gradients are sent at the optimizer's step instead."""
    model = net()
    with join(model, optimizer := sgd(model)) as peer:
        plain(model, optimizer, 0)
        loss_of(model, batch(0)).backward()
        with pytest.raises(UsageError, match=r"two gradients in one iteration: .*peer\.no_sync\(\).*another optimizer"):
            loss_of(model, batch(1)).backward()
        peer.close()


# --- when gradients are sent, and tables awaited (Modularized Parameter Server, Figure 2.4) -------------


def shard_of(peer: Peer) -> Shard:
    exchange = peer._driver.role.exchange
    assert isinstance(exchange, ServerMode)
    return exchange.shards[0]


class TakenIn:
    """Counts the pushes that the server accepts, one table each."""

    def __init__(self, shard: Shard, monkeypatch: pytest.MonkeyPatch):
        self._count = threading.Semaphore(0)
        self._push_part = shard.clock.push_part
        monkeypatch.setattr(shard.clock, "push_part", self._taken)

    def _taken(self, worker: int, progress: int) -> PushDecision:
        part = self._push_part(worker, progress)
        self._count.release()
        return part

    def come(self, tables: int, within: float = LONG) -> bool:
        """Wait until a number of further tables were pushed. Return False at the timeout."""
        return all(self._count.acquire(timeout=within) for _ in range(tables))


@pytest.mark.parametrize("wait_free", WAIT_FREE)
def test_gradients_are_sent_during_backward(join: Join, monkeypatch: pytest.MonkeyPatch, wait_free: bool) -> None:
    """Section 2.3.2: the server has the last layer's gradients before the first layer's are computed.

    All are sent before the step, from the second iteration on. Without wait-free backpropagation none is sent before
    it.
    """
    model = net()
    with join(model, optimizer := sgd(model), wait_free=wait_free, **EACH_ALONE) as peer:
        plain(model, optimizer, 0)
        taken = TakenIn(shard_of(peer), monkeypatch)
        within = LONG if wait_free else 0.0
        for step in range(2):
            optimizer.zero_grad()
            seen = []

            def between(gradient: Tensor, seen: list[bool] = seen) -> None:
                """Called between the last layer's backward pass and the first layer's."""
                assert model[2].weight.grad is not None and model[0].weight.grad is None
                seen.append(taken.come(2, within))

            hidden = model[1](model[0](batch(step)))
            hidden.register_hook(between)
            (model[2](hidden) - 1).square().mean().backward()
            seen.append(taken.come(2, within))
            assert seen == [wait_free, wait_free]
            optimizer.step()
            assert wait_free or taken.come(4)


def test_a_forward_waits_only_for_its_own_parameters(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 2.3.2: the first layer computes while the last one's tables are still being fetched."""
    model = net()
    with join(model, optimizer := sgd(model), **EACH_ALONE) as peer:
        shard, held, told = shard_of(peer), list[Received](), list[str]()
        requested, gone_on, deciding = shard.requested, threading.Event(), threading.Lock()

        def holds_back(event: Received, pull: GradientRequest | TablesRequest, now: float) -> list[Effect]:
            """Delay the server's answers to pulls of the last layer's tables after the second iteration."""
            with deciding:
                if isinstance(pull, TablesRequest) and pull.progress >= 1 and pull.bucket >= 2 and not gone_on.is_set():
                    held.append(event)
                    return []
            return requested(event, pull, now)

        def proceeds(why: str) -> None:
            told.append(why)
            with deciding:
                gone_on.set()
            while held:
                peer._driver.handle(held.pop())

        monkeypatch.setattr(shard, "requested", holds_back)
        loop(model, optimizer, plain, 2)
        late = threading.Timer(LONG, proceeds, ["it waits for all tables"])
        late.start()
        hook = model[0].register_forward_hook(lambda *_: proceeds("the first layer has computed"))
        model(batch(2))
        late.cancel()
        hook.remove()
        assert told == ["the first layer has computed"]
    same(model, loop(alone := net(), sgd(alone), plain, 2))


class Tied(nn.Module):
    """Two layers with a shared weight, a layer that only some steps use, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.now_and_then = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.frozen(self.second(torch.tanh(self.first(x))))
        return x + self.now_and_then(x) if self.calls % 3 == 0 else x


@pytest.mark.parametrize("wait_free", WAIT_FREE)
def test_tied_frozen_and_sometimes_unused(join: Join, wait_free: bool) -> None:
    model = Tied()
    frozen = model.frozen.weight.detach().clone()
    same(served(join, model, plain, wait_free=wait_free, bucket=0), loop(alone := Tied(), sgd(alone), with_zeros))
    assert torch.equal(model.frozen.weight, frozen) and model.first.weight is model.second.weight


def test_parameter_groups_and_a_rate_that_is_a_tensor(join: Join) -> None:
    def made(model: nn.Sequential) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": model[0].parameters(), "lr": torch.tensor(0.05)},
            {"params": model[2].parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.Adam(groups, lr=0.01, foreach=False)

    def run(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"].fill_(0.05 / (1 + step))
            plain(model, optimizer, step)

    with join(model := net(), optimizer := made(model)):
        run(model, optimizer)
    run(alone := net(), made(alone))
    same(model, alone, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_used_outside_its_module_only_later_is_refused_and_names_the_option(join: Join) -> None:
    model = net()
    with join(model, optimizer := sgd(model)) as peer:
        plain(model, optimizer, 0)
        with pytest.raises(UsageError, match=r"'2\.\w+' was used outside its module's forward: give --no-wait-free"):
            directly(model, optimizer, 1)
        peer.close()


@pytest.mark.parametrize("wait_free", WAIT_FREE)
def test_sparse_gradients_are_refused(join: Join, wait_free: bool):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with join(model, optimizer, wait_free=wait_free), pytest.raises(UsageError, match=r"'0\.weight' is sparse, which"):
        model(torch.arange(3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "settings", "before", "told"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}, 0, 1),
        (torch.optim.AdamW, {"weight_decay": 0.0}, 0, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 2, 1),
    ],
)
def test_a_frozen_layer_that_servers_still_move_is_named_once(
    join: Join, caplog: pytest.LogCaptureFixture, kind: Any, settings: dict[str, float], before: int, told: int
):
    model = net()
    optimizer = kind(model.parameters(), **settings)
    with join(model, optimizer):
        loop(model, optimizer, plain, steps=before)
        model[0].requires_grad_(False)
        loop(model, optimizer, plain, steps=3)
    said = [one for one in caplog.messages if "'0.weight' has no gradient in this iteration" in one]
    assert len(said) == told


def test_a_layer_with_lr_0_rests(join: Join, caplog: pytest.LogCaptureFixture):
    """The remedy in that warning."""
    model = net()
    optimizer = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[2])], weight_decay=0.1)
    before = model[0].weight.detach().clone()
    with join(model, optimizer):
        model[0].requires_grad_(False)
        optimizer.param_groups[0]["lr"] = 0.0
        loop(model, optimizer, plain, steps=3)
    torch.testing.assert_close(model[0].weight.detach(), before, rtol=0, atol=0)
    assert not any("has no gradient" in one for one in caplog.messages)


@pytest.mark.parametrize(
    ("kind", "before", "told"), [(torch.optim.Adam, 2, 1), (torch.optim.Adam, 0, 0), (torch.optim.Adagrad, 0, 0)]
)
def test_the_state_of_earlier_steps_stays_behind_with_a_warning(
    join: Join, caplog: pytest.LogCaptureFixture, kind: type[torch.optim.Adam], before: int, told: int
):
    model = net()
    optimizer = kind(model.parameters())
    loop(model, optimizer, plain, steps=before)
    with join(model, optimizer):
        loop(model, optimizer, plain, steps=3)
    assert len([one for one in caplog.messages if "state from earlier steps" in one]) == told


def test_an_optimizer_that_needs_a_closure_is_refused_at_join(join: Join):
    model = net()
    with pytest.raises(UsageError, match="LBFGS computes gradients in its step, by a closure, and servers have none"):
        join(model, torch.optim.LBFGS(model.parameters()))


@pytest.mark.fault(49)
@pytest.mark.parametrize(("change", "wait_free"), [("a group", True), ("a group", False), ("a parameter", True)])
def test_parameters_that_the_servers_do_not_have_are_refused_at_the_next_step(
    join: Join, change: str, wait_free: bool
) -> None:
    model = net()
    optimizer = sgd(model[0])
    with join(model, optimizer, wait_free=wait_free):
        loop(model, optimizer, plain, steps=1)
        if change == "a group":
            optimizer.add_param_group({"params": list(model[2].parameters())})
        else:
            optimizer.param_groups[0]["params"] += list(model[2].parameters())
        with pytest.raises(
            UsageError, match=r"other parameter groups than at gossipx\.join, or other parameters in them"
        ):
            plain(model, optimizer, 1)


# --- saving and copying a model that has the hooks of server mode ---------------------------------------


def unchanged(module: nn.Module, args: object) -> None:
    """A hook of the script."""


def saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


@pytest.mark.fault(59)
@pytest.mark.parametrize("wait_free", WAIT_FREE)
def test_a_model_is_saved_and_copied_without_the_hooks_of_server_mode(join: Join, wait_free: bool) -> None:
    model = net()
    handle = model[0].register_forward_pre_hook(unchanged)
    expected = copy.deepcopy(model)
    with join(model, optimizer := sgd(model), wait_free=wait_free) as peer:
        plain(model, optimizer, 0)
        peer.sync()
        expected.load_state_dict(model.state_dict())
        assert saved(model) == saved(expected)
        average = copy.deepcopy(model)
        plain(model, optimizer, 1)
        average(batch(2))
        assert saved(average) == saved(expected)
    expected.load_state_dict(model.state_dict())
    assert saved(model) == saved(expected)
    handle.remove()
    assert not model[0]._forward_pre_hooks


# --- modules that read the parameters of their children without calling them ----------------------------
# With wait-free backpropagation the forward of a module waits for the tables that it reads, and for no others.


class Attention(nn.Module):
    """Torch's attention between two layers: it reads the weight of its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, 4)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


class Encoder(nn.Module):
    """Torch's encoder, which has a faster path in evaluations that calls none of its layer's children."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x.view(2, -1, 4)))


class Reads(nn.Module):
    """A module that calls one child and reads the weights of others, one of them in the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(4, 4), nn.Linear(4, 4)
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(4, 3)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(functional.linear(self.called(x), self.read.weight, self.read.bias))
        innermost = self.deep[0][0]
        return functional.linear(x, innermost.weight, innermost.bias)


class TiedReads(nn.Module):
    """An embedding whose weight is also that of two output layers: one is called, of the other the weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.unused.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = functional.linear(torch.tanh(x), self.unused.weight, self.unused.bias)
        return self.head(torch.tanh(self.embedding(x)))


class OnlyEvaluates(nn.Module):
    """A module that reads its child's weight in evaluations only, where no gradient reveals it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.child = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.child(x) if self.training else functional.linear(x, self.child.weight, self.child.bias)


class Dropped(nn.Module):
    """A layer that only some steps use, and not the first: an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.last = nn.Linear(4, 4), nn.MultiheadAttention(4, 2), nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.first(x))
        return self.last(x if self.calls == 1 else self.attention(x, x, x)[0])


class Normed(nn.Module):
    """Parametrized weights, computed from others by torch's hooks before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.utils.weight_norm(nn.Linear(4, 4))
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.tanh(self.old(x)), self.new.weight, self.new.bias)


class Frozen(nn.Module):
    """A part that is called without gradients, and one whose weight is read without gradients only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.read, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = torch.tanh(self.first(x)) @ self.read.weight
        return self.last(x)


MODELS = [Attention, Encoder, Reads, TiedReads, OnlyEvaluates, Dropped, Normed, Frozen]


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


@pytest.mark.fault(64)
@pytest.mark.parametrize("wait_free", some(WAIT_FREE, True))
@pytest.mark.parametrize("kind", MODELS)
def test_training_and_evaluations(join: Join, kind: Callable[[], nn.Module], wait_free: bool) -> None:
    """Values are written into the model when they are waited for, so a module that does not wait reads old ones."""

    def outputs(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> list[Tensor]:
        seen = []
        for number in range(STEPS):
            step(model, optimizer, number)
            if number % 2:
                model.eval()
                with torch.no_grad() if number % 4 == 1 else torch.enable_grad():
                    seen.append(model(batch(100 + number)).detach().clone())
                model.train()
        return seen

    model, alone = made(kind), made(kind)
    with join(model, optimizer := sgd(model), wait_free=wait_free, **EACH_ALONE):
        own = outputs(model, optimizer, plain)
    for one, other in zip(own, outputs(alone, sgd(alone), with_zeros), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    same(model, alone, rtol=1e-5, atol=1e-6)


def waits(join: Join, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the names of the parameters that each forward waits for, in order, after two iterations."""
    seen: list[list[str]] = []
    with join(model, optimizer := sgd(model)) as peer:
        loop(model, optimizer, plain, 2)
        assert peer._backward is not None and peer._backward._forwards is not None
        wait, names = peer._backward.wait, [name for name, _ in model.named_parameters()]

        def noted(tables: Sequence[int]) -> None:
            seen.append([names[table] for table in tables])
            wait(tables)

        monkeypatch.setattr(peer._backward._forwards, "_wait", noted)
        model(batch(2))
    return [one for one in seen if one]


@pytest.mark.fault(64)
def test_a_parent_waits_for_the_children_that_it_does_not_call(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(join, made(Reads), monkeypatch) == [
        ["read.weight", "read.bias", "deep.0.0.weight", "deep.0.0.bias"],
        ["called.weight", "called.bias"],
    ]
    own = [f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
    assert waits(join, made(Attention), monkeypatch) == [own, ["last.weight", "last.bias"]]


@pytest.mark.fault(64)
def test_an_averaged_copy_of_the_model(join: Join) -> None:
    """The copy has parameters that no server knows."""

    def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, sync: Callable[[], None]) -> Tensor:
        average = torch.optim.swa_utils.AveragedModel(model)
        for number in range(STEPS):
            plain(model, optimizer, number)
            sync()
            average.update_parameters(model)
            average(batch(number))
        return average(batch(9)).detach()

    model, alone = made(Attention), made(Attention)
    with join(model, optimizer := sgd(model)) as peer:
        own = averaged(model, optimizer, peer.sync)
    torch.testing.assert_close(own, averaged(alone, sgd(alone), lambda: None), rtol=1e-5, atol=1e-6)
