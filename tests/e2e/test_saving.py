"""Saving and copying a model that has the hooks of server mode."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from ports import places
from torch import nn

import gossipx


def unchanged(module: nn.Module, args: object) -> None:
    """A hook of the script."""


def saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


@pytest.mark.fault(59)
@pytest.mark.parametrize("wait_free", [True, False])
def test_a_model_is_saved_and_copied_without_the_hooks_of_server_mode(tmp_path: Path, wait_free: bool):
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(f"{places(1)[0]}\n")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    handle = model[0].register_forward_pre_hook(unchanged)
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()

    settings = {"mode": "server", "servers": "0", "wait_free": wait_free, "logdir": str(tmp_path)}
    with gossipx.join(model, optimizer, peers=hosts, rank=0, **settings) as peer:
        step()
        peer.sync()
        expected.load_state_dict(model.state_dict())
        assert saved(model) == saved(expected)
        average = copy.deepcopy(model)
        step()
        average(torch.ones(8, 4))
        assert saved(average) == saved(expected)
    expected.load_state_dict(model.state_dict())
    assert saved(model) == saved(expected)
    handle.remove()
    assert not model[0]._forward_pre_hooks
