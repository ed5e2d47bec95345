"""Seeds of scenarios: ``bin/test`` runs the first, ``bin/test --all`` runs all."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(many: int) -> list[Any]:
    """Return the seeds from 0, all but the first marked as slow."""
    return [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, many))]
