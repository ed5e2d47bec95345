"""The order in which a peer exchanges the fragments of its model.

An exchange moves one fragment. Each peer chooses the one that it has exchanged longest ago, so all come round in turn,
and a fragment whose exchange failed is next again. A request names the fragment, so that both sides of an exchange move
the same. The fragment of a wave follows from the wave's number, which is equal on all peers. The last wave moves the
whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossipx.protocol import messages

OTHER_FRAGMENTS = "it exchanges other fragments of its model: give all peers the same --fragments"


class FragmentOrder:
    """The turns of the fragments of one peer's model.

    Args:
        fragments: number of fragments; 1: exchanges move the whole model.

    Attributes:
        order: the fragments, the one exchanged longest ago first.
    """

    def __init__(self, fragments: int = 1):
        self.order = list(range(1, fragments + 1)) if fragments > 1 else [messages.WHOLE]

    def __contains__(self, fragment: int) -> bool:
        """Return whether exchanges of this run move ``fragment``."""
        return fragment in self.order

    @property
    def next(self) -> int:
        """The fragment of the next exchange."""
        return self.order[0]

    def exchanged(self, fragment: int) -> None:
        """Record that ``fragment`` was exchanged."""
        self.order = [*(other for other in self.order if other != fragment), fragment]

    def of_wave(self, number: int) -> int:
        """Return the fragment of a wave."""
        return sorted(self.order)[(number - 1) % len(self.order)]

    def fits(self, request: messages.Request) -> bool:
        """Return whether the fragment that a received request names, if any, is one that this run exchanges."""
        match request:
            case (
                messages.PullRequest(fragment=fragment)
                | messages.PushRequest(fragment=fragment)
                | messages.PairRequest(fragment=fragment)
            ):
                return fragment in self
            case (
                messages.ShardRequest(wave=wave, fragment=fragment)
                | messages.ShareRequest(wave=wave, fragment=fragment)
            ):
                return fragment == self.of_wave(wave)
            case messages.ReferenceRequest(fragment=fragment):
                return fragment in self
        return True

    def load(self, order: Sequence[int]) -> None:
        """Continue in the saved order; ignore that of a run with another number of fragments."""
        if sorted(order) == sorted(self.order):
            self.order = list(order)
