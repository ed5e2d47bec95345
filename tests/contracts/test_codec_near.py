"""Codecs that need nearby reference values to decode, and specs that survive a round trip."""

from __future__ import annotations

import math

import pytest
import torch
from encoded import NEAR, SPECS, normal

from gossipx import codecs
from gossipx.codecs import Tensors, decode, decode_into
from gossipx.errors import ProtocolError, TooFarError, UsageError


@pytest.mark.parametrize("spec", SPECS)
def test_values_near_are_of_no_use_to_codecs_that_do_without(spec: str) -> None:
    tensor = normal(30, 40)
    codec = codecs.parse(spec)
    frame, _ = codec.encode(tensor, codec.init(tensor))
    out = torch.zeros(30, 40)
    decode_into(frame, out, near=torch.full((30, 40), 1e9))
    assert torch.equal(out, decode(frame))


@pytest.mark.parametrize("spec", NEAR)
def test_without_values_near_nothing_is_decoded_and_nothing_changed(spec: str) -> None:
    tensor = normal(30, 40)
    codec = codecs.parse(spec)
    frame, _ = codec.encode(tensor, codec.init(tensor))
    out = torch.ones(30, 40)
    for attempt in (lambda: decode(frame), lambda: decode_into(frame, out)):
        with pytest.raises(ProtocolError, match="no reference model to decode them"):
            attempt()
    with pytest.raises(UsageError, match=r"near must have the shape \(30, 40\), not \(1200,\)"):
        decode_into(frame, out, near=tensor.view(-1))
    assert bool((out == 1).all())


@pytest.mark.parametrize("spec", NEAR)
def test_a_tensor_that_is_too_far_keeps_all_of_a_frame_out(spec: str) -> None:
    """Not even the tensors before it are decoded."""
    codec = codecs.parse(spec)
    tensors = Tensors.of(normal(50), normal(60))
    vector = normal(110)
    frame, _ = codec.encode(vector, codec.init(tensors))
    near, out = vector.clone(), torch.ones(110)
    near[100] += 50.0
    with pytest.raises(TooFarError, match="give a larger theta"):
        decode_into(frame, out, tensors=tensors, near=near)
    assert bool((out == 1).all())
    for value in (math.nan, math.inf, 1e38):
        near[100] = value
        with pytest.raises(TooFarError):
            decode_into(frame, out, tensors=tensors, near=near)
    near[100] = vector[100]
    decode_into(frame, near, tensors=tensors, near=near)  # in place
    assert bool(((near - vector).abs() < 0.2).all())


@pytest.mark.parametrize("spec", [*SPECS, *NEAR, "dgc:clip=1e300", "dgc:clip=1e+20+zlib"])
def test_spec_reads_as_it_was_given(spec: str) -> None:
    codec = codecs.parse(spec)
    assert codecs.parse(codecs.describe(codec)) == codec
