"""Checkpoints on disk: named parts of tensors and plain data, each checkpoint complete or absent.

A checkpoint of one peer is a directory, named by its iteration, below the peer's ``checkpoints``. Each part is up to
two files: ``NAME.safetensors`` with its tensors, if it has any, and ``NAME.json`` with the rest. The caller chooses the
parts: a peer has ``model``, ``optimizer``, ``random`` and ``peer``, and other modules add their own. ``manifest.json``
is written last, with the size and hash of every file; a directory without a matching manifest is not a checkpoint.
Loading never unpickles anything.
"""

from gossipx.checkpoint.packed import from_bytes, to_bytes
from gossipx.checkpoint.plain import Part, pack, unpack
from gossipx.checkpoint.store import KEEP, Checkpoint, CheckpointError, NotRemovedError, Store

__all__ = [
    "KEEP",
    "Checkpoint",
    "CheckpointError",
    "NotRemovedError",
    "Part",
    "Store",
    "from_bytes",
    "pack",
    "to_bytes",
    "unpack",
]
