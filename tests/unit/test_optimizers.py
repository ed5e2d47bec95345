"""The optimizers of one model, and the iterations that their steps make. Row 83 of the table of faults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gossipx.assembly.server import Parts, serve
from gossipx.errors import UsageError
from gossipx.runtime.optimizers import Optimizers
from gossipx.settings import files

pytestmark = pytest.mark.fault(83)


class Net(nn.Module):
    """A generator and a critic of the same sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = nn.Linear(3, 3), nn.Linear(3, 3)


class Counted:
    """Two optimizers of one module, and the number of iterations after each of their steps."""

    def __init__(self, *kinds: type[torch.optim.Optimizer], fused: bool = False):
        self.net = Net()
        more: dict[str, Any] = {"fused": True} if fused else {}
        self.two = [
            kind(part.parameters(), lr=0.1, **more)
            for kind, part in zip(kinds, (self.net.made, self.net.judged), strict=True)
        ]
        self.optimizers = Optimizers(self.net, self.two)
        self.iterations = 0
        self.optimizers.count(self._count)

    def _count(self) -> None:
        self.iterations += 1

    def after(self, order: str) -> list[int]:
        """Step in this order, by number, and return the iterations after each step."""
        found = []
        for number in map(int, order):
            self.net.zero_grad()
            self.net.judged(self.net.made(torch.ones(2, 3))).square().mean().backward()
            self.two[number].step()
            found.append(self.iterations)
        return found


def test_an_iteration_ends_when_all_have_stepped() -> None:
    one = Counted(torch.optim.SGD, torch.optim.Adam)
    assert one.after("011001") == [0, 1, 1, 2, 2, 3]
    assert one.after("111110") == [3] * 5 + [4], "as a critic does"
    one.optimizers.close()
    assert one.after("01") == [4, 4]


def test_a_step_that_a_gradient_scaler_skips_is_no_step() -> None:
    """The iteration ends once its optimizer has made one."""
    one = Counted(torch.optim.SGD, torch.optim.SGD, fused=True)
    one.two[1].found_inf = torch.tensor(1.0)
    one.two[1].grad_scale = torch.tensor(1.0)
    assert one.after("01") == [0, 0]
    one.two[1].found_inf = torch.tensor(0.0)
    assert one.after("01") == [0, 1]


def test_states_are_found_again_by_class_and_parameters() -> None:
    """Both are of one class and size here, and the script gives them in another order after a resume."""
    first, again = Counted(torch.optim.Adam, torch.optim.Adam), Counted(torch.optim.Adam, torch.optim.Adam)
    first.after("011")
    again.two.reverse()
    again.optimizers.replace(again.two)
    again.optimizers.load_state_dict(copy.deepcopy(first.optimizers.state_dict()))
    steps = [float(next(iter(one.state.values()))["step"]) for one in again.two]
    assert steps == [2, 1]
    other = Counted(torch.optim.Adam, torch.optim.SGD)
    with pytest.raises(ValueError, match="it has none of the class SGD over the same parameters"):
        other.optimizers.load_state_dict(first.optimizers.state_dict())


def test_one_that_is_given_twice_counts_once() -> None:
    net, done = Net(), []
    one = torch.optim.SGD(net.parameters(), lr=0.1)
    Optimizers(net, [one, one]).count(lambda: done.append(1))
    net.made(torch.ones(2, 3)).sum().backward()
    one.step()
    assert len(done) == 1


def test_what_cannot_be_joined() -> None:
    net = Net()
    own, others = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.Adam(nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match=r"^Linear is not a torch optimizer: leave it out, and call peer\.step\(\)"):
        Optimizers(net, nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"^the optimizer trains none of the model's parameters: join the model for"):
        Optimizers(net, others)
    with pytest.raises(UsageError, match=r"^Adam trains none of the model's parameters"):
        Optimizers(net, [own, others])
    for given in ([[own], []], [{"optimizer": own}]):  # as Lightning's configure_optimizers returns them
        with pytest.raises(UsageError, match=r"^(list|dict) is not a torch optimizer"):
            Optimizers(net, given)  # type: ignore[arg-type]
    told = "is a learning rate scheduler: give the optimizer that it schedules in its place"
    for kind, arguments in (
        (torch.optim.lr_scheduler.ReduceLROnPlateau, ()),
        (torch.optim.lr_scheduler.CosineAnnealingLR, (10,)),
    ):
        scheduler = kind(own, *arguments)
        for given in (scheduler, [own, scheduler]):
            with pytest.raises(UsageError, match=f"^{kind.__name__} {told}"):
                Optimizers(net, given)


def test_servers_run_one_optimizer() -> None:
    net = Net()
    two = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.made, net.judged)]
    with pytest.raises(UsageError, match=r"^servers run one optimizer, and 2 are given: give one with several par"):
        serve(files.resolve({"servers": "0"}), ["a", "b"], 0, net, two, Parts())
