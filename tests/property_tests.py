"""The number of examples that a property test draws: fewer by default, all with ``bin/test --all``."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int, few: int | None = None) -> settings:
    """Return settings that draw ``count`` examples with ``--hypothesis-profile all``, else ``few``.

    Args:
        few: by default a fifth of ``count``.
    """
    draws_all = settings().max_examples == settings.get_profile("all").max_examples
    return settings(max_examples=count if draws_all else count // 5 if few is None else few)
