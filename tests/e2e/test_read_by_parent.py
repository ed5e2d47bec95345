"""Modules that read the parameters of their children without calling them, with a parameter server.

With wait-free backpropagation the forward of a module waits for the tables that it reads, and for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from seeds import some
from served_loops import EACH_ALONE, STEPS, Join, Step, batch, loop, plain, same, sgd, with_zeros
from torch import Tensor, nn
from torch.nn import functional

pytestmark = pytest.mark.fault(64)


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


@pytest.mark.parametrize("wait_free", some([True, False], True))
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


def test_a_parent_waits_for_the_children_that_it_does_not_call(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(join, made(Reads), monkeypatch) == [
        ["read.weight", "read.bias", "deep.0.0.weight", "deep.0.0.bias"],
        ["called.weight", "called.bias"],
    ]
    own = [f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")]
    assert waits(join, made(Attention), monkeypatch) == [own, ["last.weight", "last.bias"]]


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
