"""Server settings that the handshake compares: it refuses a peer that differs, and names the option."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gossipx import codecs
from gossipx.assembly import server
from gossipx.assembly.server import Parts, serve
from gossipx.parts import Conditions, Storages, TransmitBuffer
from gossipx.settings import files

NAMES = ("a", "b", "c")


def alike(parts: Parts | None = None, **given: Any) -> dict[str, str]:
    """Return the settings that must be equal on all peers, by option."""
    module = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    served = serve(files.resolve({"servers": "0,1", **given}), NAMES, 0, module, [optimizer], parts or Parts())
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
def test_settings_shared_by_shards_and_workers_are_compared(option: str, value: Any) -> None:
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
def test_settings_of_a_single_peer_are_not_compared(option: str, value: Any) -> None:
    assert differ(alike(), alike(**{option: value})) == []


class Sparse(TransmitBuffer):
    """A custom storage."""


def test_custom_parts_are_compared() -> None:
    assert differ(alike(), alike(Parts(storages=Storages(transmit=Sparse)))) == ["parts"]
    own = Conditions(pull=lambda view, pull: True, push=lambda view: True)
    assert differ(alike(), alike(Parts(sync=own))) == ["--sync"]


def test_a_codec_says_that_it_was_compiled_only_if_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow import of numba, or of a codec without loops, was called compiling."""
    monkeypatch.setattr(server, "SLOW_COMPILE", 0.0)
    codec = codecs.parse("3lc")
    server.warm_up(codec)
    caplog.clear()
    server.warm_up(codec)
    assert caplog.text == ""
    counts = iter([0, 3])
    monkeypatch.setattr(codecs, "compilations", lambda: next(counts))
    server.warm_up(codec)
    assert "compiling 3lc took" in caplog.text


def test_compiled_loops_are_counted_and_those_read_from_the_cache_are_not(tmp_path: Path) -> None:
    path = tmp_path / "doubled.py"
    path.write_text("from gossipx.codecs.loops import loop\n\n\n@loop\ndef doubled(x):\n    return 2 * x\n")
    codecs.parse("3lc").init(torch.zeros(1))
    for expected in (1, 0):
        before = codecs.compilations()
        spec = importlib.util.spec_from_file_location("doubled", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.doubled(2) == 4
        assert codecs.compilations() - before == expected
