"""Codecs: lossy and lossless encodings of tensors for the wire.

``parse("3lc:sparsity=1.75")`` returns a :class:`Codec`, an immutable value. ``codec.init(tensor)`` returns its initial
state, ``codec.encode(tensor, state)`` returns a frame and the next state, and ``decode(frame)`` returns the tensor.
Frames are self-describing and checked on arrival, see ``gossipx.codecs.frames``. :class:`ErrorFeedback` adds the
encoding error of one frame to the input of the next.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

from gossipx import specs
from gossipx.codecs.base import (
    Codec,
    ErrorFeedback,
    FramePlan,
    NoCodec,
    PerTensor,
    State,
    decode,
    decode_into,
    encoded_bytes,
)
from gossipx.codecs.frames import SQUEEZERS, Tensors, zstandard
from gossipx.errors import UsageError, how_to_install
from gossipx.specs import plugins
from gossipx.specs.codecs import CODECS, ENTRY_POINT_GROUP, RETIRED_CODECS, retired

__all__ = [
    "BUILT_IN",
    "ENTRY_POINT_GROUP",
    "Codec",
    "ErrorFeedback",
    "FramePlan",
    "NoCodec",
    "PerTensor",
    "State",
    "Tensors",
    "alone",
    "compilations",
    "decode",
    "decode_into",
    "describe",
    "encoded_bytes",
    "encoder",
    "names",
    "parse",
]


def _kind(place: str) -> type[Codec]:
    """Import the class that a row of the table names, ``module.Class``."""
    module, _, name = place.partition(".")
    kind: type[Codec] = getattr(importlib.import_module(f"gossipx.codecs.{module}"), name)
    return kind


BUILT_IN = {name: _kind(row.kind) for name, row in CODECS.items()}


def parse(spec: str | Codec) -> Codec:
    """Return the codec that ``spec`` names.

    Args:
        spec: ``none``, ``3lc:sparsity=1.75``, ``topk:ratio=0.01,small=256``, each optionally followed by ``+zlib`` or
            ``+zstd``; or a codec. Installed packages add names by entry points of the group ``gossipx.codecs``.

    Raises:
        UsageError: the spec is wrong; the message lists valid names or keys.
    """
    if isinstance(spec, Codec):
        return spec
    plain, *after = re.split(r"\+(?=\s*[A-Za-z])", spec, maxsplit=1)  # does not split at the + of 1e+20
    if (name := plain.partition(":")[0].strip()) in RETIRED_CODECS:
        raise UsageError(retired(name))
    codec = plugins.build(plain, BUILT_IN, ENTRY_POINT_GROUP, "codec")
    if not isinstance(codec, Codec):
        raise UsageError(f"codec '{spec}': its entry point returns a {type(codec).__name__}, not a codec")
    if codec.needs_numba and importlib.util.find_spec("numba") is None:  # it takes long to import
        raise UsageError(f"codec '{spec}' needs numba: {how_to_install('codecs')}, or use one without, such as fp16")
    if not after:
        return codec
    squeezed = after[0].strip()
    if squeezed not in SQUEEZERS[1:]:
        raise UsageError(f"codec '{spec}': one of {', '.join('+' + by for by in SQUEEZERS[1:])} may follow, once")
    if squeezed == "zstd":
        zstandard()
    return dataclasses.replace(codec, squeezed=squeezed)


def encoder(codec: Codec) -> Codec | ErrorFeedback:
    """Return the encoder that a link uses for changes: the codec, wrapped in error feedback if its option says so."""
    return ErrorFeedback(codec) if codec.feedback else codec


def alone() -> list[str]:
    """Return the names of the built-in codecs that are precise enough to encode a model itself, not only a change."""
    return [name for name, kind in BUILT_IN.items() if kind is not NoCodec and kind.alone]


def names() -> dict[str, Callable[..., Any]]:
    """Return all known codec names, built-in and from installed packages; the latter are not imported yet."""
    return plugins.names(BUILT_IN, ENTRY_POINT_GROUP)


def compilations() -> int:
    """Return how often this process has compiled a loop of a codec, and not read it from the cache on disk."""
    loops = sys.modules.get("gossipx.codecs.loops")  # not imported for codecs without loops, since numba takes long
    return 0 if loops is None else int(loops.compilations())


def describe(codec: Codec) -> str:
    """Return the spec of a codec; a codec that is not built in appears under its class name."""
    known: dict[type[Codec], str] = {kind: name for name, kind in BUILT_IN.items()}
    plain = specs.text(dataclasses.replace(codec, squeezed=""), known.get(type(codec), type(codec).__name__))
    return f"{plain}+{codec.squeezed}" if codec.squeezed else plain
