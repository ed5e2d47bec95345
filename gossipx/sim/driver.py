"""The driver of a simulated peer: that of real processes, which also logs what the role does with models."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gossipx.errors import GossipxError
from gossipx.hub import ElasticExchange
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import Snapshot
from gossipx.peer import PeerRole
from gossipx.protocol.effects import (
    AddPeer,
    Adopt,
    ApplyWave,
    Effect,
    Keep,
    Merge,
    Mix,
    ReportEntry,
    ReportSwitch,
    Send,
)
from gossipx.protocol.events import Event, Failed, Fault, Merged, Mixed, Poisoned
from gossipx.protocol.messages import (
    LAST_WAVE,
    CentreRequest,
    ElasticRequest,
    FinalRequest,
    InitialRequest,
    PairRequest,
    PullRequest,
    PushRequest,
    Request,
    RoundRequest,
    TakeRequest,
)
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.captures import Retrieval
from gossipx.runtime.driver.clock import Clock

PLACES = 2**20
"""Uploads that a peer receives at a time: virtual time cannot wait for a place."""


@dataclass(frozen=True, kw_only=True)
class Mixing(Retrieval):
    """A received model that was mixed, or merged in a wave, while training.

    Attributes:
        time: virtual time of the mixing.
        step: this peer's iteration.
    """

    time: float
    step: int


class SimDriver(Driver):
    """A driver in virtual time.

    Args:
        role, arena, clock: as for :class:`~gossipx.runtime.driver.Driver`.
        note: adds a line to the log.
        warn: does so, too, for what a real peer would log, given its topic.
        entries: receives the answers to processes that asked this peer to admit them.

    Attributes:
        mixings: received models that were mixed, or merged in a wave, while training.
    """

    def __init__(
        self,
        role: PeerRole,
        arena: ParameterArena,
        clock: Clock,
        note: Callable[[str], None],
        warn: Callable[[str, str], None],
        entries: list[ReportEntry],
    ):
        super().__init__(role, arena, PLACES, clock, warn)
        self.mixings: list[Mixing] = []
        self._log = note
        self._entries = entries
        self._senders: dict[int, int] = {}  # of models and replies, by ticket
        self._requesters: dict[Hashable, int] = {}  # by key
        self._actions: dict[int, str] = {}  # what is done with a model, by ticket
        self.on_retrieval = self.keep_mixing

    def requested(self, sender: int, key: Hashable) -> None:
        """Record who sent the request ``key``, before the driver receives it."""
        self._requesters[key] = sender

    def fail(self, error: GossipxError) -> None:
        """Log why training stops."""
        super().fail(error)
        self._log(f"must stop: {error}")

    def keep_mixing(self, retrieval: Retrieval) -> None:
        """Add a retrieval to :attr:`mixings`."""
        self.mixings.append(Mixing(**vars(retrieval), time=self.clock.now(), step=self.arena.step))

    def _is_centre(self, ticket: int) -> bool:
        """Whether a captured model is a hub's centre, rather than that of a wave."""
        exchange = self.role.exchange
        return (
            isinstance(exchange, ElasticExchange) and exchange.centre is not None and exchange.centre.ticket == ticket
        )

    # --- the log ------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Log the outcome of an action, and pass the event on."""
        match event:
            case Mixed(ticket) if action := self._actions.pop(ticket, ""):
                self._log(action)
            case Merged(ticket, _, sound) if action := self._actions.pop(ticket, ""):
                self._log(action if sound else f"refuses the model of {self._senders.get(ticket)}")
            case Poisoned(ticket) | Failed(ticket, Fault.POISONED):
                self._log(f"refuses the model of {self._senders.get(ticket)}")
            case Failed(ticket, fault):
                self._log(f"has no answer of {self._senders.get(ticket)}: {fault.name}")
        super().handle(event)

    def _carry_out_locked(self, effect: Effect) -> Snapshot | None:
        match effect:
            case Keep(key, ticket):
                self._senders[ticket] = self._requesters[key]
            case AddPeer(peer):
                self._log(f"hears of {peer.rank}")
        return super()._carry_out_locked(effect)

    def _carry_out(self, effect: Effect, snapshot: Snapshot | None) -> None:
        match effect:
            case Send(ticket, to, request):
                self._senders[ticket] = to
                if text := _described(request, to):
                    self._log(text)
            case Mix(ticket):
                self._actions[ticket] = f"mixes {self._senders[ticket]}"
            case Merge(ticket, into):
                verb = "takes in" if self._is_centre(into) else "mixes"
                self._actions[ticket] = f"{verb} {self._senders[ticket]}"
            case ApplyWave(ticket):
                self._actions[ticket] = "takes the mean in"
            case Adopt(ticket):
                self._actions[ticket] = f"adopts the model of {self._senders[ticket]}"
            case ReportSwitch(_, problem):
                self._log(problem or "has switched the sync model")
                return
            case ReportEntry():
                self._entries.append(effect)
                return
        super()._carry_out(effect, snapshot)


def _described(request: Request, to: int) -> str:
    """Return the log line of a request for a model or an exchange; empty for other requests."""
    match request:
        case InitialRequest():
            return f"asks {to} for the initial model"
        case PullRequest():
            return f"pulls {to}"
        case PushRequest():
            return f"pushes to {to}"
        case PairRequest():
            return f"asks {to} to pair"
        case TakeRequest():
            return f"takes from {to}"
        case RoundRequest(wave, number):
            return f"meets {to} in round {number}" + ("" if wave == LAST_WAVE else f" of wave {wave}")
        case ElasticRequest():
            return f"uploads its model to {to}"
        case CentreRequest():
            return f"asks {to} for the centre"
        case FinalRequest():
            return f"asks {to} for the final model"
    return ""
