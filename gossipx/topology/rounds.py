"""Who meets whom in an agreement, round by round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Meeting:
    """One peer's part in one round of an agreement.

    Attributes:
        partner: position of the one met.
        takes: whether this peer takes the partner's model in.
        gives: whether the partner takes this peer's.
        whole: whether it takes that model in its own's place, rather than average.
    """

    partner: int
    takes: bool = True
    gives: bool = True
    whole: bool = False


def agreement_rounds(size: int) -> int:
    """Rounds of an agreement among ``size`` peers: log2 of it, and two more unless it is a power of two."""
    core = size.bit_length() - 1
    return core if size == 1 << core else core + 2


def agreement_meeting(position: int, round: int, size: int) -> Meeting | None:
    """Whom the peer at ``position`` meets in ``round``, or None if it rests.

    Recursive doubling: among a power of two of peers, each round k pairs those whose positions differ in bit k alone,
    and averaging each pair leaves all equal to the mean of all, exactly. Peers beyond the largest power of two first
    give their models to one of these (averages are weighted by how many models they hold), and take the result at the
    end.

    Args:
        position: from 0 to ``size`` − 1, among those that take part.
        round: from 0 to ``agreement_rounds(size)`` − 1.
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
