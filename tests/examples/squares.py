# squares.py
"""A custom growth function: K is the square root of the number of gradients."""

import math
from dataclasses import dataclass

from gossipx.parts import Growth, Hybrid, Parts


@dataclass(frozen=True)
class Squares(Growth):
    def threshold(self, gradients):  # K for the gradients-th gradient, from 1
        return math.isqrt(gradients)


parts = Parts(sync=Hybrid(Squares()))
