"""Random generators that draw the same numbers on every peer, whatever its version of numpy."""

from __future__ import annotations

import numpy as np


def seeded(*numbers: int) -> np.random.RandomState:
    """A generator fixed by ``numbers`` (each taken modulo 2^64).

    ``RandomState`` and not ``Generator``: numpy keeps the streams of the first as they are for good (NEP 19), while
    those of the second may change with its version, and two peers would then disagree on who owns which sample.
    """
    words = [(number >> shift) & 0xFFFFFFFF for number in numbers for shift in (0, 32)]
    return np.random.RandomState(words)
