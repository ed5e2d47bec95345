"""The int8 of torch operations that bin/bench codecs compares with: it must do the same work."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from gossipx import codecs


@pytest.mark.parametrize("whole", [False, True])
def test_the_output_and_the_error_add_up_to_the_input(benches: Path, whole: bool) -> None:
    speed = importlib.import_module("_codec_speed")
    case = speed.Case.of(speed.drawn(5120, 0.1), 2 * 5120)
    case.turn(0)
    left = torch.full_like(case.x, 0.1)
    works = speed.TorchInt8(case, left, whole).works()
    works[speed.FED]()
    works[speed.DECODE]()
    assert torch.allclose(case.out + left, case.x + 0.1, atol=1e-4)
    works[speed.ADD]()
    assert torch.allclose(case.out / 2 + left, case.x + 0.1, atol=1e-4)
    works[speed.ENCODE]()
    works[speed.DECODE]()
    ours = codecs.parse("int8")
    assert torch.allclose(codecs.decode(ours.encode(case.x[:5120], ours.init(case.x[:5120]))[0]), case.out[:5120])
