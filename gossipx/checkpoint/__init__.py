"""Checkpoints on disk: named parts, each of tensors and plain data, that are whole or none.

A checkpoint of one peer is a directory, named by its iteration, below the peer's ``checkpoints``. Each part is two
files: ``NAME.safetensors`` with its tensors, if it has any, and ``NAME.json`` with the rest. What parts there are is up
to whoever saves: a peer has ``model``, ``optimizer``, ``random`` and ``peer``, and any other room may add its own.
``manifest.json`` is written last and holds the size and the hash of every file; without one that fits, a directory is
no checkpoint. Nothing that is read is ever unpickled.
"""

from gossipx.checkpoint.every import CheckpointInterval
from gossipx.checkpoint.packed import from_bytes, to_bytes
from gossipx.checkpoint.plain import Part, pack, unpack
from gossipx.checkpoint.store import KEEP, Checkpoint, CheckpointError, Store

__all__ = [
    "KEEP",
    "Checkpoint",
    "CheckpointError",
    "CheckpointInterval",
    "Part",
    "Store",
    "from_bytes",
    "pack",
    "to_bytes",
    "unpack",
]
