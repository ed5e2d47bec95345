"""What a shard's clock says is to be done."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass


class Pulls(enum.Enum):
    """When a pull that was delayed is answered (FluentPS, section III-C).

    Attributes:
        LAZY: when the clock has passed its progress, so that it holds every push up to its own iteration.
        SOFT: as soon as its pull condition holds: the soft barrier of SSP.
    """

    LAZY = "lazy"
    SOFT = "soft"


class Fate(enum.Enum):
    """What becomes of one message of a push."""

    APPLY = "apply"
    BUFFER = "buffer"
    DROP = "drop"


@dataclass(frozen=True)
class Part:
    """What to do with one message of a push.

    Attributes:
        fate: apply its gradients now, add them to the gradient buffer, or throw them away.
        scale: what they are multiplied with before they are applied: 1 / N (Algorithm 1, line 15) or 1.
    """

    fate: Fate
    scale: float = 1.0


@dataclass(frozen=True)
class ApplyBuffer:
    """Do one optimizer step with the mean of the gradient buffer, and empty it.

    Attributes:
        count: complete pushes in it, by which the sum is divided; at least 1. Where a push comes in several messages it
            can be cut in two by a step: a table then holds one push more or less than that, and a shard that counts
            what it adds to each table has the exact mean.
    """

    count: int


@dataclass(frozen=True)
class Tick:
    """The clock has come to ``clock``."""

    clock: int


@dataclass(frozen=True)
class Release:
    """Answer the pull that was given ``key``."""

    key: Hashable


Decision = ApplyBuffer | Tick | Release


@dataclass
class Counts:
    """What has happened so far.

    Attributes:
        pulls: pulls that came.
        delayed: how many of these had to wait (DPRs).
        late: pushes thrown away because they came late.
        gradients: complete pushes that were not thrown away.
    """

    pulls: int = 0
    delayed: int = 0
    late: int = 0
    gradients: int = 0
