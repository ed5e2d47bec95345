"""Random generators with the same numbers on every peer, independent of the version of numpy."""

from __future__ import annotations

import numpy as np


def seeded(*numbers: int) -> np.random.RandomState:
    """Return a generator seeded by ``numbers`` (each modulo 2^64).

    It is a ``RandomState``, whose streams numpy guarantees to keep (NEP 19). Those of ``Generator`` may change between
    versions, and peers would then disagree on the partition of the samples.
    """
    words = [(number >> shift) & 0xFFFFFFFF for number in numbers for shift in (0, 32)]
    return np.random.RandomState(words)
