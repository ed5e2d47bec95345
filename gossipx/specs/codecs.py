"""The table of built-in codecs, which parsing, shell completion, ``docs/codecs.md`` and the contract tests read.

It names the classes without importing them, since they import torch, and a shell completes names at each key press. A
new codec is a class in a module of ``gossipx.codecs``, a row here, a test of its paper, and a line of the changelog.
"""

from __future__ import annotations

from typing import NamedTuple

ENTRY_POINT_GROUP = "gossipx.codecs"
"""Entry-point group by which installed packages add codecs."""


class CodecRow(NamedTuple):
    """A built-in codec. Its keys, their defaults and what they mean are those of its class.

    Attributes:
        kind: the class, ``module.Class`` in the package ``gossipx.codecs``.
        bits: what a value takes in a frame, in bits, for the documentation.
        examples: specs that the contract tests run.
    """

    kind: str
    bits: str
    examples: tuple[str, ...]


CODECS = {
    "none": CodecRow("base.NoCodec", "32", ("none", "none+zlib")),
    "fp16": CodecRow("levels.Float16", "16", ("fp16",)),
    "bf16": CodecRow("levels.BFloat16", "16", ("bf16",)),
    "int8": CodecRow("levels.Int8", "8", ("int8", "int8:block=64")),
    "3lc": CodecRow(
        "ternary.ThreeLC",
        "0.1 to 1.6 per pass",
        (
            *("3lc:sparsity=1", "3lc:sparsity=1.75", "3lc:sparsity=1,residual=0.3"),
            *("3lc:sparsity=1.5+zlib", "3lc:sparsity=1.5+zstd"),
        ),
    ),
    "stochastic3": CodecRow("rivals.Stochastic3", "1.6", ("stochastic3",)),
    "onebit": CodecRow("rivals.OneBit", "1", ("onebit",)),
    "signsgd": CodecRow("rivals.SignSGD", "1", ("signsgd", "signsgd:magnitude=1")),
    "efsignsgd": CodecRow("rivals.EFSignSGD", "1", ("efsignsgd",)),
    "topk": CodecRow(
        "sparse.TopK",
        "32 and 1, or log₂ n, per sent value",
        ("topk:ratio=0.05", "topk:ratio=0.05,sample=0.1", "topk:ratio=0.05,small=32+zstd"),
    ),
    "topk2": CodecRow(
        "rivals.TopK2",
        "9.5 per sent value",
        ("topk2:ratio=0.05,chunk=256", "topk2:ratio=0.1,chunk=100,decay=1,small=32+zlib"),
    ),
    "qsgd": CodecRow("rivals.QSGD", "4", ("qsgd:levels=7", "qsgd:levels=4,block=0")),
    "powersgd": CodecRow("rivals.PowerSGD", "32 · rank · (rows + columns) per matrix", ("powersgd:rank=2",)),
    "dgc": CodecRow("sparse.DGC", "as topk", ("dgc:ratio=0.01",)),
    "localsteps": CodecRow("rivals.LocalSteps", "32 / k", ("localsteps:k=2",)),
}

RETIRED_CODECS = {
    "uint8-minmax": "int8",
    "natural": "int8 or qsgd",
    "threshold": "topk",
    "randomk": "topk",
    "moniqua": "int8, with --references 0",
}
"""Codecs that earlier versions had, and what to use in their place."""
RETIRED_NUMBERS = {6: "uint8-minmax", 8: "natural", 13: "threshold", 14: "randomk", 18: "moniqua"}
"""Their numbers in frames, which no other codec may take."""


def retired(name: str) -> str:
    """Return what to tell a user of a codec that has been retired."""
    return f"codec '{name}' has been retired: use {RETIRED_CODECS[name]}"
