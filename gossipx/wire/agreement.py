"""The properties that two peers must share before they exchange models: hosts file, settings, and model manifest.

Each function describes a difference in one line that names both sides, so that a user can act on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gossipx.errors import UsageError, printable
from gossipx.wire import MAX_DESCRIPTION, Hello

# Maximum length of a received line in a message.
_SHOWN = 200


def objection(own: Hello, theirs: Hello, names: Sequence[str]) -> str | None:
    """Return in one line why ``theirs`` may not connect to ``own``; None if it may.

    A different model is not an objection at this point: the opener may request the :class:`~gossipx.wire.Description`.

    Args:
        names: of the peers of the run, by rank. Those of peers that joined it under way are not compared.
    """
    if (theirs.peers, theirs.size) != (own.peers, own.size):
        return (
            f"the hosts files of {theirs.name} ({theirs.size} peers) and {own.name}"
            f" ({own.size} peers) differ; give every peer the same file"
        )
    if theirs.rank == own.rank:
        return f"rank {own.rank} is this peer itself; start one process for each line of the hosts file"
    if theirs.joined:
        if (theirs.joined[0].rank, theirs.joined[0].name) != (theirs.rank, theirs.name) or theirs.rank < own.size:
            return f"{theirs.name} is not rank {theirs.rank}, as which it joined"
    elif theirs.rank >= own.size or theirs.name != names[theirs.rank]:
        return f"{theirs.name} is not rank {theirs.rank} of this run; give every peer the same hosts file"
    for option in sorted(own.settings.keys() | theirs.settings.keys()):
        values = [f"{peer.settings.get(option, 'none')} at {peer.name}" for peer in (theirs, own)]
        if own.settings.get(option) != theirs.settings.get(option):
            return f"{option} is {' and '.join(values)}; give every peer the same value"
    return None


def manifest_bytes(lines: Sequence[str]) -> bytes:
    """Return the manifest of a model, one line per tensor, in the form that is sent and hashed.

    Raises:
        UsageError: it is too large to send.
    """
    manifest = "\n".join(lines).encode()
    if len(manifest) > MAX_DESCRIPTION:
        raise UsageError(
            f"the model has too many tensors: their descriptions take {len(manifest)} bytes, at"
            f" most {MAX_DESCRIPTION} can be sent to other peers"
        )
    return manifest


def difference(own: bytes, theirs: bytes) -> str:
    """Return in one line the first tensor in which two manifests differ, as each side has it."""
    lines = [manifest.decode(errors="replace").split("\n") for manifest in (own, theirs)]
    for index, (own_line, other) in enumerate(zip_longest(*lines, fillvalue="no such tensor")):
        if own_line != other:
            return f"tensor {index} is {_shown(own_line)} here and {_shown(other)} there"
    return "the descriptions are equal, the digests differ"


def _shown(line: str) -> str:
    return f"'{printable(line, _SHOWN)}'"
