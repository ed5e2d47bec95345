"""The pairs of each round of a wave, after which all its members hold the mean of their models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundPart:
    """One peer's part in one round of a wave.

    Attributes:
        partner: position of the other peer.
        receives: whether this peer receives the partner's model.
        sends: whether the partner receives this peer's model.
        replaces: whether the received model replaces this peer's model, rather than being averaged with it.
    """

    partner: int
    receives: bool = True
    sends: bool = True
    replaces: bool = False


def wave_rounds(size: int) -> int:
    """Return the number of rounds among ``size`` peers: ⌊log2 size⌋, and two more unless size is a power of 2."""
    core = size.bit_length() - 1
    return core if size == 1 << core else core + 2


def part_in_round(position: int, round: int, size: int) -> RoundPart | None:
    """Return the part of the peer at ``position`` in ``round``, or None if it is idle.

    Recursive doubling: among 2^k peers, round i pairs those whose positions differ in bit i only. Averaging each pair
    leaves every peer with the exact mean of all models. Peers beyond the largest power of two first send their models
    to one of these (averages are weighted by the number of models they contain), and get the result in the last round.

    Args:
        position: from 0 to ``size`` − 1, among the participants.
        round: from 0 to ``wave_rounds(size)`` − 1.
        size: number of participants.
    """
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    if extra:
        if round in (0, wave_rounds(size) - 1):
            last = round > 0
            if position >= core:
                return RoundPart(position - core, receives=last, sends=not last, replaces=last)
            return RoundPart(position + core, receives=not last, sends=last) if position < extra else None
        round -= 1
    return RoundPart(position ^ (1 << round)) if position < core else None
