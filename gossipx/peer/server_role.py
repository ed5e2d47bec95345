"""The server role: the work that one peer does on behalf of all others.

Plain gossip has no such work, so the methods here do nothing. A hub and a parameter server override them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gossipx.protocol.effects import Effect, ReportSwitch
from gossipx.protocol.events import ChangeServers, Merged, Prepared, Received, SwitchSync, TablesRestored


class Total(NamedTuple):
    """A sum over ``number`` items so far: the mean since the last record is recorded."""

    sum: float
    number: int


Metrics = dict[str, tuple[int, float | Total]]
"""Figures of a server by tag, each with the iteration that the workers have reached."""

NO_SERVER = "this run has no parameter server"


class ServerRole:
    """The part of a role that serves other peers. Methods return the effects to carry out."""

    # --- what it is -------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Whether this peer trains, so that others may pull its model; False for a peer that only serves."""
        return True

    @property
    def is_needed_at_finish(self) -> bool:
        """Whether others need this peer until they finish training, so that its own finish has no timeout."""
        return False

    @property
    def awaits_all(self) -> bool:
        """Whether the final model exists only once all peers have trained, so that its finish has no timeout."""
        return False

    @property
    def contributions(self) -> int:
        """How often something of others was merged into what is held here: models into a centre, or gradients."""
        return 0

    @property
    def delayed_pulls(self) -> int:
        """Number of table pulls that were delayed here."""
        return 0

    @property
    def metrics(self) -> Metrics:
        """The figures of this server's part of the run."""
        return {}

    # --- during training --------------------------------------------------------------------------

    def start_serving(self, now: float) -> list[Effect]:
        """Start serving: all peers have reached START."""
        return []

    def members_changed(self, now: float) -> list[Effect]:
        """Check waiting requests again, since the membership list may have changed: a new stage, a failed request."""
        return []

    def peer_lost(self, rank: int, now: float) -> list[Effect]:
        """Handle a peer that is considered dead."""
        return []

    def merged(self, event: Merged, now: float) -> list[Effect] | None:
        """Handle a merge into a model held here; return None if it went into another model."""
        return None

    def initial_model_requested(self, event: Received, now: float) -> list[Effect] | None:
        """Handle a request for an initial model; return None if our own model may be sent as it is."""
        return None

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        """Push gradients that were computed."""
        return []

    def tables_restored(self, event: TablesRestored, now: float) -> list[Effect]:
        """Resume a shard whose tables were restored."""
        return []

    def prepared(self, event: Prepared, now: float) -> list[Effect]:
        """Handle the outcome of PrepareTables: the tables to be hosted here are complete, or are not available."""
        return []

    def switch_sync(self, event: SwitchSync, now: float) -> list[Effect]:
        """Switch to another sync model."""
        return [ReportSwitch(event.number, NO_SERVER)]

    def change_servers(self, event: ChangeServers, now: float) -> list[Effect]:
        """Move the shards to other servers."""
        return [ReportSwitch(event.number, NO_SERVER)]

    # --- the end ----------------------------------------------------------------------------------

    def fetch_final_model(self, now: float) -> list[Effect] | None:
        """Fetch the final model, as all peers have reached the finish; return None if it is the mean of all models."""
        return None

    def adopted(self, ticket: int, now: float) -> list[Effect] | None:
        """Handle an adopted model; return None if it was not requested here."""
        return None

    @property
    def failed_source(self) -> int | None:
        """Rank of the peer that failed to deliver the final model, so that a wave must form it; None otherwise."""
        return None

    def hand_over_all(self, now: float) -> list[Effect]:
        """Hand over what others need from this peer, before it leaves. Meanwhile :attr:`is_handing_over` is true."""
        return []

    @property
    def is_handing_over(self) -> bool:
        """Whether the hand-over to other peers is still under way."""
        return False
