"""How often checkpoints are taken, as settings spell it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gossipx.errors import UsageError


@dataclass(frozen=True)
class CheckpointInterval:
    """So many iterations, or so many seconds; of both 0: no checkpoint is taken at intervals."""

    iterations: int = 0
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.iterations or self.seconds)

    @classmethod
    def parse(cls, text: str) -> CheckpointInterval:
        """What ``500`` (iterations), ``60s`` (seconds) or ``0`` (never) means.

        Raises:
            UsageError: it is none of these.
        """
        found = re.fullmatch(r"(\d{1,12})|(\d{1,12}(?:\.\d{1,9})?) ?s", text.strip(), re.ASCII)
        if found is None:
            raise UsageError(f"'{text}' is no interval: iterations such as 500, or seconds such as 60s; 0: none")
        return cls(iterations=int(found[1])) if found[1] else cls(seconds=float(found[2]))
