"""Attending: a peer that others need, a hub or a server, stays until all that train have come to their finish.

Whoever is not heard of is asked for a sign of life, so that a worker that has died without a word is not waited for.
"""

from __future__ import annotations

from gossipx.actor import Effect, SetTimer
from gossipx.messages import ArriveRequest, Stage
from gossipx.peer.membership import Membership
from gossipx.peer.requests import Requests

ATTEND = "attend"
"""The timer of the next look."""
LOOK = 1 / 4
"""Share of peer_timeout between two looks: one that is silent is lost soon after peer_timeout has passed."""


class Attending:
    """Waits for the end of the others' training. Each method says what is to be done.

    Args:
        members: the role's; ``requests`` too.
        incarnation: one's own.
        timeout: peer_timeout, in seconds.
    """

    def __init__(self, members: Membership, requests: Requests, incarnation: int, timeout: float):
        self._members = members
        self._requests = requests
        self._incarnation = incarnation
        self._timeout = timeout
        self._on = False

    @property
    def over(self) -> bool:
        """Whether nobody trains any more, as far as is known."""
        return not self._training()

    def _training(self) -> list[int]:
        stages = {rank: self._members.others[rank].stage for rank in self._members.awaited()}
        return [rank for rank, stage in stages.items() if stage is not None and stage < Stage.FINISH]

    def begin(self, now: float) -> list[Effect]:
        """One's own training has ended: look after the others from now on."""
        self._on = True
        return self.look(now)

    def end(self) -> None:
        """Nobody is looked after any more."""
        self._on = False

    def look(self, now: float) -> list[Effect]:
        """The timer has fired: ask those that train whether they still do."""
        training = self._training()
        if not self._on or not training:
            return []
        asked = self._requests.asked(ArriveRequest)
        here = ArriveRequest(Stage.TRAIN, self._incarnation)
        signs: list[Effect] = [
            self._requests.send(rank, here, now, now + self._timeout) for rank in training if rank not in asked
        ]
        return [*signs, SetTimer(ATTEND, now + LOOK * self._timeout)]
