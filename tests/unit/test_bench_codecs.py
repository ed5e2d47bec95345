"""The torch codecs that bin/bench codecs compares with: they must do the same work."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from encoded import normal
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import packing


@pytest.fixture(scope="module")
def theirs(benches: Path) -> ModuleType:
    return importlib.import_module("_torch_codecs")


@pytest.mark.parametrize("count", [5, 17, 5120, 30_003])
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("name", ["ThreeLC", "Int8", "TopK"])
def test_the_output_and_the_error_add_up_to_the_input(theirs: ModuleType, name: str, fed: bool, count: int) -> None:
    codec = theirs.ThreeLC(1.0) if name == "ThreeLC" else getattr(theirs, name)()
    x, left = normal(count) ** 3, normal(count, seed=1) * 0.1
    wanted = x + left if fed else x
    code = codec.encode(x, left if fed else None)
    out = torch.full((count,), 7.0)
    codec.decode(code, out, False)
    if fed:
        assert torch.allclose(out + left, wanted, atol=1e-4)
    if name != "TopK":
        ours = codecs.parse({"ThreeLC": "3lc:sparsity=1", "Int8": "int8"}[name])
        assert torch.allclose(codecs.decode(ours.encode(wanted, ours.init(wanted))[0]), out, atol=1e-5)
    more = out.clone()
    codec.decode(code, more, True)
    assert torch.allclose(more, 2 * out)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 1.0])
def test_zero_run_encoding_is_the_same(theirs: ModuleType, part: float) -> None:
    draws = torch.Generator().manual_seed(0)
    others: Tensor = torch.randint(0, packing.ZEROS, (9000,), generator=draws)
    packed = torch.where(torch.rand(9000, generator=draws) < part, others, packing.ZEROS).to(torch.uint8)
    assert torch.equal(theirs._shortened(packed), packing.shorten_runs(packed))
