"""What peers of a run with servers compare as they meet: the handshake turns away who differs, and names the option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gossipx.assembly.server import Parts, serve
from gossipx.config import files
from gossipx.parts import Conditions, Storages, TransmitBuffer

NAMES = ("a", "b", "c")


def alike(parts: Parts | None = None, **given: Any) -> dict[str, str]:
    """By option, what the others must have, too."""
    module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    served = serve(files.resolve({"servers": "0,1", **given}), NAMES, 0, module, optimizer, parts or Parts())
    assert served is not None
    return served.alike


def differ(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [option for option in one if one[option] != other[option]]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("servers", "0,2"),
        ("server_replicas", 1),
        ("servers_only", True),
        ("sync", "ssp:staleness=3"),
        ("sync", "bsp|asp"),
        ("sync_plan", "500=asp"),
        ("apply", "push"),
        ("pulls", "soft"),
        ("placement", "sliced"),
        ("bucket", 0),
    ],
)
def test_what_decides_how_shards_and_workers_go_together_is_compared(option: str, value: Any) -> None:
    assert differ(alike(), alike(**{option: value})) == [f"--{option.replace('_', '-')}"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("wait_free", False),
        ("overlap", False),
        ("server_lost", "stop"),
        ("journal", False),
        ("checkpoint_every", "100"),
    ],
)
def test_what_each_peer_may_have_its_own_way_is_not(option: str, value: Any) -> None:
    assert differ(alike(), alike(**{option: value})) == []


class Sparse(TransmitBuffer):
    """Another one."""


def test_parts_of_ones_own_are_compared() -> None:
    assert differ(alike(), alike(Parts(storages=Storages(transmit=Sparse)))) == ["parts"]
    own = Conditions(pull=lambda view, pull: True, push=lambda view: True)
    assert differ(alike(), alike(Parts(sync=own))) == ["--sync"]
