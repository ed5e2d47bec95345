"""Peers that have a part of their own in a run: by name or number."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.errors import UsageError
from gossipx.specs import suggest


def rank_of(given: str, option: str, names: Sequence[str]) -> int:
    """The rank of a peer that is given by its name or number.

    Raises:
        UsageError: it is no peer.
    """
    if given in names:
        return names.index(given)
    if given.isdecimal() and int(given) < len(names):
        return int(given)
    meant = suggest(given, dict.fromkeys(names))
    raise UsageError(f"{option} '{given}' is no peer: a number from 0 to {len(names) - 1}, or a name{meant}")
