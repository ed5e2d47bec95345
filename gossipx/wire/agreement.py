"""What two peers must have alike before they exchange models: hosts files, settings, the manifest of the model.

Each function tells a difference in one line that names both sides, for a person to act on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gossipx.errors import UsageError
from gossipx.wire import MAX_DESCRIPTION, Hello

# Characters of a foreign line that a message shows.
_SHOWN = 200


def objection(own: Hello, theirs: Hello, names: Sequence[str]) -> str | None:
    """Return why ``theirs`` may not connect to ``own``, in one line; None if it may.

    Another model is no objection yet: its opener may ask for the :class:`~gossipx.wire.Description`.

    Args:
        names: of the run's peers, by rank.
    """
    if (theirs.peers, theirs.size) != (own.peers, own.size):
        return (
            f"the hosts files of {theirs.name} ({theirs.size} peers) and {own.name}"
            f" ({own.size} peers) differ; give every peer the same"
        )
    if theirs.rank == own.rank:
        return f"rank {own.rank} is this peer itself; start each line of the hosts file once"
    if theirs.rank >= own.size or theirs.name != names[theirs.rank]:
        return f"{theirs.name} is not rank {theirs.rank} of this run"
    for option in sorted(own.settings.keys() | theirs.settings.keys()):
        has = [f"{one.settings.get(option, 'none')} at {one.name}" for one in (theirs, own)]
        if own.settings.get(option) != theirs.settings.get(option):
            return f"{option} is {' and '.join(has)}; give every peer the same"
    return None


def manifest_bytes(lines: Sequence[str]) -> bytes:
    """Return a model's manifest, one line per tensor, as it is sent and digested.

    Raises:
        UsageError: it is larger than can be sent.
    """
    manifest = "\n".join(lines).encode()
    if len(manifest) > MAX_DESCRIPTION:
        raise UsageError(
            f"the model has too many tensors: their descriptions take {len(manifest)} bytes, at"
            f" most {MAX_DESCRIPTION} can be compared with other peers"
        )
    return manifest


def difference(own: bytes, theirs: bytes) -> str:
    """Return the first tensor in which two manifests differ, as each has it, in one line."""
    lines = [manifest.decode(errors="replace").split("\n") for manifest in (own, theirs)]
    for index, (mine, other) in enumerate(zip_longest(*lines, fillvalue="no such tensor")):
        if mine != other:
            return f"tensor {index} is {_shown(mine)} here and {_shown(other)} there"
    return "yet their descriptions are the same"


def _shown(line: str) -> str:
    return "'" + "".join(c if c.isprintable() else "?" for c in line[:_SHOWN]) + "'"
