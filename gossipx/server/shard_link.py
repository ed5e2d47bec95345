"""A worker's link to one shard: what it has sent, what waits to be sent, and which replies are still open."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from gossipx.server.sync_models.conditions import SyncModel

NONE_YET = 2**63
"""A clock above all others: no table of this pull has arrived yet."""


class PullState(enum.Enum):
    """The state of an iteration's pull at one shard; the next iteration starts again from any state."""

    IDLE = "no pull"
    SKIPPED = "no pull after this iteration, whose pushes are in flight"
    ASKED = "the shard was asked whether it would answer (without overlap)"
    READY = "it would answer; other shards have not replied yet"
    FETCHING = "its buckets are being pulled"


NEXT = {PullState.SKIPPED: PullState.IDLE, PullState.ASKED: PullState.READY, PullState.READY: PullState.FETCHING}
"""The next states: once all pushes are acknowledged, once the shard has replied, once all shards have replied."""


@dataclass
class ShardLink:
    """A worker's link to one shard.

    Attributes:
        holders: the ranks that may hold the shard.
        buckets: the number of its buckets.
        holder_index: the index of the holder that requests are sent to.
        ready: buckets whose gradients wait to be pushed.
        pushed_to: the rank and the incarnation of the server that this iteration's gradients were first pushed to;
            None: none yet.
        pushing: open pushes by ticket, each with its bucket and iteration.
        to_pull: buckets to pull; -1 asks whether the shard would answer.
        pulling: open pulls by ticket, each with its bucket and progress.
        pulled: the progress to pull with.
        pull: the state of this iteration's pull.
        backing_off: requests wait for the retry timer, since the shard did not answer; possible in any state.
        fetched: the lowest clock of the tables received in this pull.
        seen: the highest clock of all replies.
        restart_of: the incarnation of the server whose restart was reported last.
        sync: the shard's sync model, which decides after which iterations to pull; None: after each.
        sync_spec: that model as the shard's last reply named it.
    """

    holders: tuple[int, ...]
    buckets: int
    holder_index: int = 0
    ready: deque[int] = field(default_factory=deque)
    pushed_to: tuple[int, int | None] | None = None
    pushing: dict[int, tuple[int, int]] = field(default_factory=dict)
    to_pull: deque[int] = field(default_factory=deque)
    pulling: dict[int, tuple[int, int]] = field(default_factory=dict)
    pulled: int = -1
    pull: PullState = PullState.IDLE
    backing_off: bool = False
    fetched: int = NONE_YET
    seen: int = 0
    restart_of: int | None = None
    sync: SyncModel | None = None
    sync_spec: str = ""

    @property
    def server(self) -> int:
        return self.holders[self.holder_index]

    @property
    def idle(self) -> bool:
        return not (self.ready or self.pushing or self.waits)

    @property
    def waits(self) -> bool:
        """Whether any of its tables have not arrived."""
        return bool(self.to_pull or self.pulling)

    def start(self, asks_first: bool) -> None:
        """Start pulling all buckets; ``asks_first``: only after the shard has replied that it would answer."""
        self.pull = PullState.ASKED if asks_first and self.buckets else PullState.FETCHING
        self.to_pull = deque([-1] if self.pull is PullState.ASKED else range(self.buckets))
        self.fetched = NONE_YET

    def advance(self) -> None:
        """Enter the next state."""
        self.pull = NEXT[self.pull]

    def clear(self) -> None:
        """Forget everything that is open or waits to be sent."""
        self.ready.clear()
        self.pushing.clear()
        self.to_pull.clear()
        self.pulling.clear()
