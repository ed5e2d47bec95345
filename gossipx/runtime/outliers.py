"""Outliers: received models that are suddenly far from this peer's.

A peer whose weights were damaged (a bit flip, a wrong checkpoint, a diverging learning rate) moves every peer that
mixes its model in. The distance of each received model is measured anyway, so a sudden change of it is seen without a
pass over the model. In a wave it is known only of the first model that a peer merges, and not if models are encoded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch

from gossipx.model.arena import ParameterArena

RECENT = 16
"""Number of distances that a new one is compared with."""
LEAST = 4
"""Number of distances before the first judgement: all peers may begin with one model, at a distance of 0."""
FACTOR = 10.0
"""A model is an outlier only if it is farther away than this many times the largest recent distance."""
NORMS = 2.0
"""And only if it is farther away than this many times the norm of our model.

The distance alone also grows from one retrieval to the next where a schedule starts the learning rate again, but stays
far below the norm. And if it is our model that is damaged, all others are at a distance of its norm.
"""


class Outliers:
    """The judgement of received models, one after the other.

    Args:
        arena: this peer's model.
        note: logs a text on a topic.

    Attributes:
        count: number of outliers so far.
    """

    def __init__(self, arena: ParameterArena, note: Callable[[str, str], None]):
        self.count = 0
        self._arena = arena
        self._note = note
        self._recent: deque[float] = deque(maxlen=RECENT)

    def judge(self, distance: float | None, sender: int | None) -> None:
        """Judge a model of ``sender`` by its distance from ours, ‖x_j − x_i‖₂; None: the distance is not known.

        An outlier is mixed in like any model, which moves ours, and so becomes one of the recent distances: of a peer
        that stays away, only the first model is counted.
        """
        if distance is None:
            return
        largest = max(self._recent, default=0.0)
        if len(self._recent) >= LEAST and distance > FACTOR * largest and distance > NORMS * self._norm():
            self.count += 1
            if self.count == 1:
                times = f"more than {FACTOR:g} times as far from ours as the last {len(self._recent)} models"
                text = (
                    f"the model of peer {sender} is {times}: it is mixed in, and counted in outliers; look at that peer"
                )
                self._note("outlier", text)
        self._recent.append(distance)

    def _norm(self) -> float:
        """Return ‖x_i‖₂ over the trained values."""
        norms = [torch.linalg.vector_norm(s.values[: s.trainable], dtype=torch.float64) for s in self._arena.sections]
        return math.hypot(*map(float, norms))
