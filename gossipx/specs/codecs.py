"""The table of built-in codecs, ``codecs.toml``, for parsing, completion, ``docs/codecs.md`` and the contract tests.

It names the classes without importing them, since they import torch, and a shell completes names at each key press. A
new codec is a class in a module of ``gossipx.codecs``, a table in that file, a test of its paper, and a line of the
changelog.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import msgspec

from gossipx.specs import toml

ENTRY_POINT_GROUP = "gossipx.codecs"
"""Entry-point group by which installed packages add codecs."""


class CodecRow(msgspec.Struct, frozen=True):
    """A built-in codec.

    Attributes:
        kind: the class, ``module.Class`` in the package ``gossipx.codecs``.
        bits: what a value takes in a frame, in bits, for the documentation.
        examples: specs that the contract tests run.
    """

    kind: str
    bits: str
    examples: tuple[str, ...]


class RetiredCodec(msgspec.Struct, frozen=True):
    """A codec that earlier versions had.

    Attributes:
        use: what to use in its place.
        number: its number in frames, which no other codec may take.
    """

    use: str
    number: int


_TEXT = importlib.resources.files("gossipx.specs").joinpath("codecs.toml").read_text("utf-8")
_TABLES = toml.loads(_TEXT, Path("codecs.toml"))
CODECS = msgspec.convert(_TABLES["codecs"], dict[str, CodecRow])
RETIRED_CODECS = msgspec.convert(_TABLES["retired"], dict[str, RetiredCodec])
RETIRED_NUMBERS = {codec.number: name for name, codec in RETIRED_CODECS.items()}


def retired(name: str) -> str:
    """Return what to tell a user of a codec that has been retired."""
    return f"codec '{name}' has been retired: use {RETIRED_CODECS[name].use}"
