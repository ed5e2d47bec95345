# adaptive.py
"""Figure 2.3d: workers also push only when their tables are too old; until then their gradients gather."""

from dataclasses import dataclass

from stale import SSPConsistency


@dataclass(frozen=True)
class AdaptiveConsistency(SSPConsistency):
    def pushes(self, progress, fetched):  # AfterClientUpdate
        return self.fetches(progress, fetched)
