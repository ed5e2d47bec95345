"""The safetensors file of a model: its mode follows the umask, and it is complete or absent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gossipx.errors import GossipxError
from gossipx.model import safetensors_file


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_the_files_mode_follows_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        safetensors_file.write(tmp_path / "model.safetensors", {"weight": torch.ones(3)}, "give another place")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == mode
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    safetensors_file.write(target, {"weight": torch.ones(3)}, "give another place")
    (tmp_path / ".model.safetensors.tmp").mkdir()
    with pytest.raises(GossipxError, match=r"model\.safetensors: it cannot be written .*; make room, or give another"):
        safetensors_file.write(target, {"weight": torch.zeros(3)}, "give another place")
    assert torch.equal(load_file(target)["weight"], torch.ones(3))


def test_equal_models_are_equal_bytes(tmp_path: Path) -> None:
    """The order of metadata was random: 20 files of one model had several checksums."""
    tensors = {'wärme."0"': torch.ones(3), "bias": torch.zeros(2, dtype=torch.float64), "empty": torch.zeros(0)}
    metadata = {"format": "pt", "gossipx.iteration": "7", "note": 'tab\t "quoted" / ü \x01', "a": "b"}
    files = [tmp_path / f"{number}.safetensors" for number in range(20)]
    for file in files:
        safetensors_file.write(file, tensors, "give another place", metadata)
    assert len({file.read_bytes() for file in files}) == 1
    with safe_open(files[0], "pt") as read:
        assert read.metadata() == metadata
        assert set(read.keys()) == set(tensors) and torch.equal(read.get_tensor("bias"), tensors["bias"])
