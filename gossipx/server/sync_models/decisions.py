"""The decisions of a shard's clock: what to do with pushes and pulls."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass


class DelayedPulls(enum.Enum):
    """The index of a delayed pull, which is answered once the clock has passed it (FluentPS, section III-C).

    Attributes:
        LAZY: its progress. The answer holds every push up to its own iteration, and the worker has lost its lead.
        SOFT: V_train, so that it waits for one tick: the soft barrier of SSP. The worker keeps its lead.
    """

    LAZY = "lazy"
    SOFT = "soft"


class Handling(enum.Enum):
    """The handling of one message of a push."""

    APPLY = "apply"
    BUFFER = "buffer"
    DROP = "drop"


@dataclass(frozen=True)
class Part:
    """The decision about one message of a push.

    Attributes:
        handling: apply its gradients now, add them to the gradient buffer, or drop them.
        scale: the factor to apply them with: 1 / N (Algorithm 1, line 15) or 1.
        buffers: whether gradients that are applied now are added to the buffer, too.
    """

    handling: Handling
    scale: float = 1.0
    buffers: bool = False


@dataclass(frozen=True)
class ApplyBuffer:
    """Do one optimizer step with the mean of the gradient buffer, and empty it.

    Attributes:
        count: the number of complete pushes in the buffer, at least 1: the divisor of the sum. If a step cuts a push of
            several messages in two, some tables hold one push more or less than that; for the exact mean, a shard
            counts the gradients that it adds to each table.
        sums: use the sum in place of the mean.
    """

    count: int
    sums: bool = False


@dataclass(frozen=True)
class Tick:
    """The clock has advanced to ``clock``."""

    clock: int


@dataclass(frozen=True)
class Release:
    """Answer the pull with this ``key``."""

    key: Hashable


Decision = ApplyBuffer | Tick | Release


@dataclass
class Counts:
    """Counts of events so far.

    Attributes:
        pulls: pulls received.
        delayed: pulls that had to wait (DPRs).
        late: pushes dropped because they were late.
        gradients: complete pushes that were not dropped.
        applied: those that are not in the gradient buffer any more.
        steps: optimizer steps, if one push counts as one step where it is applied in several messages.
        staleness: the sum over ``applied`` of the steps between the pull that the gradient was computed with and the
            step that applies it.
    """

    pulls: int = 0
    delayed: int = 0
    late: int = 0
    gradients: int = 0
    applied: int = 0
    steps: int = 0
    staleness: int = 0
