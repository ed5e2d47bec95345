"""The server role: the work that one peer does on behalf of all others.

Plain gossip has no such work, so the methods here do nothing. A hub and a parameter server override them.
"""

from __future__ import annotations

from typing import NamedTuple

from gossipx.protocol.effects import Effect, ReportOutcome
from gossipx.protocol.events import ChangeServers, Event, Merged, Received, SwitchSync


class Total(NamedTuple):
    """A sum over ``number`` items so far: the mean since the last record is recorded."""

    sum: float
    number: int


Metrics = dict[str, tuple[int, float | Total]]
"""Figures of a server by tag, each with the iteration that the workers have reached."""

NO_SERVER = "this run has no parameter server"


class ServerRole:
    """The part of a role that serves other peers. Methods return the effects to carry out.

    Attributes:
        trains: whether this peer trains, so that others may pull its model; False for a peer that only serves.
        awaits_all: whether the final model exists only once all peers have trained, so that its finish has no timeout.
        failed_source: rank of the peer that failed to deliver the final model, so that a wave must form it.
    """

    trains = True
    awaits_all = False
    failed_source: int | None = None

    # --- what it is -------------------------------------------------------------------------------

    @property
    def is_needed_at_finish(self) -> bool:
        """Whether others need this peer until they finish training, so that its own finish has no timeout."""
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

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Handle an event that only a parameter server knows: about gradients, tables, sync models or servers."""
        return [ReportOutcome(event.number, NO_SERVER)] if isinstance(event, SwitchSync | ChangeServers) else []

    # --- the end ----------------------------------------------------------------------------------

    def fetch_final_model(self, now: float) -> list[Effect] | None:
        """Fetch the final model, as all peers have reached the finish; return None if it is the mean of all models."""
        return None

    def adopted(self, ticket: int, now: float) -> list[Effect] | None:
        """Handle an adopted model; return None if it was not requested here."""
        return None

    def hand_over_all(self, now: float) -> list[Effect]:
        """Hand over what others need from this peer, before it leaves. Meanwhile :attr:`is_handing_over` is true."""
        return []

    @property
    def is_handing_over(self) -> bool:
        """Whether the hand-over to other peers is still under way."""
        return False
