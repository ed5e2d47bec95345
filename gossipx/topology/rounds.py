"""The pairs of each round of an agreement, after which all its peers hold the mean of their models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meeting:
    """One peer's part in one round of an agreement.

    Attributes:
        partner: position of the other peer.
        takes: whether this peer receives the partner's model.
        gives: whether the partner receives this peer's model.
        whole: whether the received model replaces this peer's model, rather than being averaged with it.
    """

    partner: int
    takes: bool = True
    gives: bool = True
    whole: bool = False


def agreement_rounds(size: int) -> int:
    """Return the rounds of an agreement among ``size`` peers: ⌊log2 size⌋, and two more unless size is a power of 2."""
    core = size.bit_length() - 1
    return core if size == 1 << core else core + 2


def agreement_meeting(position: int, round: int, size: int) -> Meeting | None:
    """Return the part of the peer at ``position`` in ``round``, or None if it is idle.

    Recursive doubling: among 2^k peers, round i pairs those whose positions differ in bit i only. Averaging each pair
    leaves every peer with the exact mean of all models. Peers beyond the largest power of two first send their models
    to one of these (averages are weighted by the number of models they contain), and get the result in the last round.

    Args:
        position: from 0 to ``size`` − 1, among the participants.
        round: from 0 to ``agreement_rounds(size)`` − 1.
        size: number of participants.
    """
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    if extra:
        if round in (0, agreement_rounds(size) - 1):
            last = round > 0
            if position >= core:
                return Meeting(position - core, takes=last, gives=not last, whole=last)
            return Meeting(position + core, takes=not last, gives=last) if position < extra else None
        round -= 1
    return Meeting(position ^ (1 << round)) if position < core else None
