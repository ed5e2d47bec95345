"""The number of examples that a property test draws: fewer by default, all with ``bin/test --all``."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> settings:
    """Return settings that draw ``count`` examples with ``--hypothesis-profile all``, else three tenths of them."""
    return settings(max_examples=count * settings().max_examples // 100)
