"""Parameters of scenarios: ``bin/test`` runs some, ``bin/test --all`` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def seeds(many: int) -> list[Any]:
    """Return the seeds from 0, all but the first marked as slow."""
    return some(range(many), 0)


def some(values: Iterable[Any], *often: Any) -> list[Any]:
    """Return the values, all but those in ``often`` marked as slow."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.slow) for value in values]
