"""The setting that says how often checkpoints are taken."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gossipx.errors import UsageError


@dataclass(frozen=True)
class CheckpointInterval:
    """An interval in iterations or in seconds; if both are 0, no checkpoints are taken at intervals."""

    iterations: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.iterations or self.seconds)

    @classmethod
    def parse(cls, text: str) -> CheckpointInterval:
        """Parse ``500`` (iterations), ``60s`` (seconds) or ``0`` (never).

        Raises:
            UsageError: not one of these forms.
        """
        found = re.fullmatch(r"(\d{1,12})|(\d{1,12}(?:\.\d{1,9})?) ?s", text.strip(), re.ASCII)
        if found is None:
            raise UsageError(
                f"'{text}' is not an interval: use iterations such as 500, seconds such as 60s or 0 for none"
            )
        return cls(iterations=int(found[1])) if found[1] else cls(seconds=float(found[2]))
