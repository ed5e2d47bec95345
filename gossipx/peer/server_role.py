"""What a peer does for all others: nothing in gossip; a hub and a parameter server override it."""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.protocol.effects import Effect, Switched
from gossipx.protocol.events import ChangeServers, Merged, Prepared, Received, SwitchSync, TablesRestored

NO_SERVER = "this run has no parameter server"


class ServerRole:
    """The part of a role that serves others. Each method returns the effects to carry out."""

    # --- what it is -------------------------------------------------------------------------------

    @property
    def gives(self) -> bool:
        """Whether our own model is one that others may pull, since this peer trains."""
        return True

    @property
    def attends(self) -> bool:
        """Whether others need this peer until the end of their training, however long that takes."""
        return False

    @property
    def awaits_all(self) -> bool:
        """Whether the final model exists only once all have trained, however long that takes."""
        return False

    @property
    def taken_in(self) -> int:
        """Models of others that were merged into the one that it holds for all."""
        return 0

    @property
    def delayed_pulls(self) -> int:
        """Pulls of tables that had to wait here."""
        return 0

    @property
    def counted(self) -> dict[str, tuple[int, float]]:
        """Figures that are counted here for all: by tag, the iteration that workers have come to, and the figure."""
        return {}

    # --- while the run lasts ----------------------------------------------------------------------

    def begun(self, now: float) -> list[Effect]:
        """Begin: all peers have come to START."""
        return []

    def look(self, now: float) -> list[Effect]:
        """Look again at what waits, since another peer has told how far it has come."""
        return []

    def lost(self, rank: int, now: float) -> list[Effect]:
        """Note that another peer is lost."""
        return []

    def merged(self, event: Merged, now: float) -> list[Effect] | None:
        """Handle a merge into a model held here; return None if it was into another."""
        return None

    def before_giving(self, event: Received, now: float) -> list[Effect] | None:
        """Handle a request for a model to begin with; return None if our own may be given as it is."""
        return None

    def gradients_ready(self, buckets: Sequence[tuple[int, int]], now: float) -> list[Effect]:
        """Push gradients that have been made."""
        return []

    def tables_restored(self, event: TablesRestored, now: float) -> list[Effect]:
        """Continue with a shard whose tables are restored."""
        return []

    def prepared(self, event: Prepared, now: float) -> list[Effect]:
        """Handle tables that have come to be held here, or cannot come."""
        return []

    def switch(self, event: SwitchSync, now: float) -> list[Effect]:
        """Switch to another sync model."""
        return [Switched(event.number, NO_SERVER)]

    def change(self, event: ChangeServers, now: float) -> list[Effect]:
        """Change to other servers."""
        return [Switched(event.number, NO_SERVER)]

    # --- the end ----------------------------------------------------------------------------------

    def agree(self, now: float) -> list[Effect] | None:
        """Take the final model, as all have come to the finish; return None if that is the mean of all models."""
        return None

    def adopted(self, ticket: int, now: float) -> list[Effect] | None:
        """Note that a model was adopted; return None if it was not requested here."""
        return None

    @property
    def forsaken(self) -> int | None:
        """The peer that was to give the final model and does not: the mean of the others' models takes its place."""
        return None

    def hand_over_all(self, now: float) -> list[Effect]:
        """Hand over to others what they need of this peer, before it leaves: as long as it :attr:`stays`."""
        return []

    @property
    def stays(self) -> bool:
        """Whether something is still being handed over."""
        return False
