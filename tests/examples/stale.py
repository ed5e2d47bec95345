# stale.py
"""Code 4.4: stale synchronous parallelism; workers pull only when their tables are too old."""

from dataclasses import dataclass

from gossipx.parts import SyncModel


@dataclass(frozen=True)
class SSPConsistency(SyncModel):
    staleness: int = 5

    def fetches(self, progress, fetched):  # AfterClientUpdate
        return progress >= fetched + self.staleness

    def may_pull(self, state, view, pull):  # BeforeGetServerData
        return pull.progress < view.clock + self.staleness
