"""The int8 of torch operations that bin/bench codecs compares with: it must do the same work."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gossipx import codecs


@pytest.mark.parametrize("whole", [False, True])
def test_the_codes_are_ours_and_add_up_to_the_input_with_the_error(benches: Path, whole: bool) -> None:
    speed = SimpleNamespace(**runpy.run_path(str(benches / "codecs.py")))
    case = speed.Case.of(speed.drawn(5120, 0.1), 2 * 5120)
    case.turn(0)
    left = torch.full_like(case.x, 0.1)
    theirs = speed.TorchInt8(case, left, whole)

    def decoded() -> Tensor:
        return torch.cat([levels * scale for scale, levels in theirs.codes])

    theirs.works()[speed.FED]()
    assert torch.allclose(decoded() + left, case.x + 0.1, atol=1e-4)
    theirs.works()[speed.ENCODE]()
    x, ours = case.x[:5120], codecs.parse("int8")
    assert torch.allclose(codecs.decode(ours.encode(x, ours.init(x))[0]), decoded()[:5120])
