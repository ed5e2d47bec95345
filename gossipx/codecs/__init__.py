"""Codecs: how tensors are encoded for the wire.

``parse("3lc:sparsity=1.75")`` is a :class:`Codec`, an immutable value; ``codec.init(tensor)`` is its state,
``codec.encode(tensor, state)`` gives a frame and the state from there on, and ``decode(frame)`` the tensor. Frames are
self-describing and checked, see ``gossipx.codecs.frames``. :class:`ErrorFeedback` adds what a codec left out to what
it encodes next.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from gossipx import specs
from gossipx.codecs.base import Codec, decode, decode_into, encoded_bytes
from gossipx.codecs.feedback import ErrorFeedback, LocalSteps
from gossipx.codecs.frames import SQUEEZERS, Tensors, zstandard
from gossipx.codecs.levels import QSGD, BFloat16, Float16, Int8, Natural, UInt8MinMax
from gossipx.codecs.lowrank import PowerSGD
from gossipx.codecs.modulo import Moniqua
from gossipx.codecs.per_tensor import NoCodec, PerTensor
from gossipx.codecs.signs import EFSignSGD, OneBit, SignSGD
from gossipx.codecs.sparse import DGC, RandomK, Threshold, TopK
from gossipx.codecs.state import Plan, State
from gossipx.codecs.ternary import Stochastic3, ThreeLC
from gossipx.errors import UsageError
from gossipx.specs import plugins

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Codec",
    "ErrorFeedback",
    "NoCodec",
    "PerTensor",
    "Plan",
    "State",
    "Tensors",
    "alone",
    "decode",
    "decode_into",
    "describe",
    "encoded_bytes",
    "encoder",
    "names",
    "parse",
]

BUILT_IN: dict[str, Callable[..., Codec]] = {
    "none": NoCodec,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "uint8-minmax": UInt8MinMax,
    "3lc": ThreeLC,
    "stochastic3": Stochastic3,
    "onebit": OneBit,
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "qsgd": QSGD,
    "natural": Natural,
    "signsgd": SignSGD,
    "efsignsgd": EFSignSGD,
    "powersgd": PowerSGD,
    "dgc": DGC,
    "localsteps": LocalSteps,
    "moniqua": Moniqua,
}
ENTRY_POINT_GROUP = "gossipx.codecs"


def parse(spec: str | Codec) -> Codec:
    """The codec that ``spec`` means.

    Args:
        spec: ``none``, ``3lc:sparsity=1.75``, ``topk:ratio=0.01,small=256``, any of them with ``+zlib`` or ``+zstd``
            behind it; or a codec. Installed packages add names by entry points of the group ``gossipx.codecs``.

    Raises:
        UsageError: naming what would have been right.
    """
    if isinstance(spec, Codec):
        return spec
    plain, *after = re.split(r"\+(?=\s*[A-Za-z])", spec, maxsplit=1)  # and not the one of 1e+20
    made = plugins.build(plain, BUILT_IN, ENTRY_POINT_GROUP, "codec")
    if not isinstance(made, Codec):
        raise UsageError(f"codec '{spec}': its entry point makes a {type(made).__name__}, not a codec")
    if not after:
        return made
    squeezed = after[0].strip()
    if squeezed not in SQUEEZERS[1:]:
        raise UsageError(f"codec '{spec}': one of {', '.join('+' + by for by in SQUEEZERS[1:])} may follow, once")
    if squeezed == "zstd":
        zstandard()
    return dataclasses.replace(made, squeezed=squeezed)


def encoder(codec: Codec) -> Codec | ErrorFeedback:
    """What a link encodes changes with: the codec, in error feedback if it wants that."""
    return ErrorFeedback(codec) if codec.feedback else codec


def alone(near: bool = True) -> list[str]:
    """Built-in codecs that keep enough of every value to be of use for a model itself.

    Args:
        near: those as well that are decoded near a model that is there.
    """
    kinds = {name: kind for name, kind in BUILT_IN.items() if isinstance(kind, type) and issubclass(kind, Codec)}
    return [name for name, kind in kinds.items() if kind is not NoCodec and kind.alone and (near or not kind.near)]


def names() -> dict[str, Callable[..., Any]]:
    """What a spec may begin with; installed ones are not imported yet."""
    return plugins.names(BUILT_IN, ENTRY_POINT_GROUP)


def describe(codec: Codec) -> str:
    """A codec as a spec reads; by the name of its class where it has no other."""
    known: dict[object, str] = {kind: name for name, kind in BUILT_IN.items()}
    plain = specs.text(dataclasses.replace(codec, squeezed=""), known.get(type(codec), type(codec).__name__))
    return f"{plain}+{codec.squeezed}" if codec.squeezed else plain
