"""Custom codecs, and the specs of codecs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar, final

import numpy as np
import pytest
import torch
from encoded import normal
from torch import Tensor

from gossipx import codecs
from gossipx.codecs import ErrorFeedback, PerTensor, State, decode, frames
from gossipx.errors import ProtocolError, UsageError
from gossipx.specs import plugins


@final
@dataclass(frozen=True)
class Rounded(PerTensor):
    """A custom codec: integers of one byte."""

    step: float = 1.0
    number: ClassVar[int] = 200

    def _most(self, count: int, shape: tuple[int, ...]) -> int:
        return 4 + count

    def _bytes(self, values: Tensor, shape: tuple[int, ...], state: State, index: int) -> Sequence[Tensor | bytes]:
        step = torch.tensor([self.step])
        return step, (values / self.step).round().clamp(-127, 127).to(torch.int8)

    @classmethod
    def _values(cls, data: np.ndarray, shape: tuple[int, ...], count: int, device: torch.device) -> Tensor:
        if len(data) != 4 + count:
            raise ProtocolError(f"{count} values do not take {len(data)} bytes")
        step = float(data[:4].copy().view("<f4")[0])
        return torch.from_numpy(data[4:].copy()).view(torch.int8).float() * step


def test_a_codec_of_ones_own_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("rounded", f"{__name__}:Rounded", codecs.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group, name=None: [point] if group == point.group else [])
    codec = codecs.parse("rounded:step=0.5+zlib")
    assert codec == Rounded(0.5, squeezed="zlib")
    feedback = ErrorFeedback(codec)
    tensor = normal(20, 30)
    frame, state = feedback.encode(tensor, feedback.init(tensor))
    assert torch.equal(decode(frame), (tensor / 0.5).round() * 0.5)
    assert torch.allclose(decode(frame) + state.kept["error"].view(20, 30), tensor)


def test_two_codecs_of_one_number_are_refused() -> None:
    with pytest.raises(ValueError, match="codec number 3 is already taken by ThreeLC"):

        class Other(PerTensor):
            number: ClassVar[int] = 3

    with pytest.raises(ValueError, match="codec number 13 was that of 'threshold' and is not given again"):

        class Another(PerTensor):
            number: ClassVar[int] = 13


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("3lb", r"unknown codec '3lb' \(did you mean '3lc'\?\)"),
        ("3lc:sparsity=2", "sparsity must be at least 1 and below 2, not 2.0"),
        ("3lc:residual=0", "residual is a fraction of a norm"),
        ("3lc:small=-1", "small must be a number"),
        ("int8:block=-1", "block counts values"),
        ("topk:ratio=0", "ratio is a fraction of the values"),
        ("topk:sample=2", "sample is a fraction of the values"),
        ("topk2:ratio=0", "ratio is a fraction of the values, above 0"),
        ("topk2:chunk=0", "chunk is a number of values, from 1 on"),
        ("topk2:decay=1.5", "decay is a factor, above 0 and at most 1"),
        ("threshold:0.5", "codec 'threshold' has been retired: use topk"),
        ("natural+zlib", "codec 'natural' has been retired: use int8 or qsgd"),
        ("qsgd:levels=0", "levels are from 1 to 65535"),
        ("signsgd:magnitude=-1", "magnitude must be a finite number"),
        ("powersgd:rank=0", "rank must be from 1 to 65535"),
        ("dgc:momentum=1", "momentum must be at least 0 and below 1"),
        ("dgc:clip=-1", "clip is a norm"),
        ("dgc:feedback=true", "would count them twice"),
        ("localsteps:k=0", "k must be at least 1 frame"),
        ("int8:squeezed=zlib", "unknown key 'squeezed'"),
        ("int8+zlib+zlib", r"one of \+zlib, \+zstd may follow, once"),
    ],
)
def test_a_wrong_spec_names_what_would_have_been_right(spec: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        codecs.parse(spec)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[zstd\]' in your clone of gossipx, or use \+zlib"):
        codecs.parse("int8+zstd")
    with pytest.raises(UsageError, match="zstandard"):
        frames.zstandard()
