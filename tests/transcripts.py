"""Worlds in virtual time whose log also tells what each peer does with models, and faults that only tests inject."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossipx.hub import ElasticExchange
from gossipx.model.pool import typed
from gossipx.protocol import effects, events, messages
from gossipx.runtime.driver.captures import Retrieval
from gossipx.sim import Network, SimPeer, World

ASK_AGAIN = 1.0
"""Virtual seconds after which a process that was not admitted asks again."""


@dataclass(frozen=True, kw_only=True)
class MixedModel(Retrieval):
    """A received model that was mixed, or merged in a wave, while training: when, and in which iteration of the
    receiver."""

    time: float
    step: int


class Transcript:
    """The account of what one peer does with models, as lines of its world's log.

    Attributes:
        retrievals: received models that were mixed, or merged in a wave, while training.
        entries: the answers to processes that asked this peer to admit them.
    """

    def __init__(self, peer: SimPeer):
        self.retrievals: list[MixedModel] = []
        self.entries: list[effects.ReportEntry] = []
        self._peer = peer
        self._senders: dict[int, int] = {}  # of models and replies, by ticket
        self._requesters: dict[Hashable, int] = {}  # by key
        self._actions: dict[int, str] = {}  # what is done with a model, by ticket
        peer.driver.trace = self._tell
        peer.driver.on_retrieval = self._keep

    def _keep(self, retrieval: Retrieval) -> None:
        self.retrievals.append(MixedModel(**vars(retrieval), time=self._peer.world.now, step=self._peer.step))

    def _tell(self, what: events.Event | effects.Effect) -> None:
        if line := self._line(what):
            self._peer.note(line)

    def _line(self, what: events.Event | effects.Effect) -> str:
        """Return the line of an event or an effect; empty: it has none."""
        match what:
            case events.Received(sender, key):
                self._requesters[key] = sender
            case events.Mixed(ticket):
                return self._actions.pop(ticket, "")
            case events.Merged(ticket, _, sound) if action := self._actions.pop(ticket, ""):
                return action if sound else f"refuses the model of {self._senders.get(ticket)}"
            case events.ShardAveraged(_, counted):
                return f"averages the codes of {counted}"
            case events.Poisoned(ticket) | events.Failed(ticket, events.Fault.POISONED):
                return f"refuses the model of {self._senders.get(ticket)}"
            case events.Failed(ticket, fault):
                return f"has no answer of {self._senders.get(ticket)}: {fault.name}"
            case effects.Keep(key, ticket):
                self._senders[ticket] = self._requesters[key]
            case effects.AddPeer(peer):
                return f"hears of {peer.rank}"
            case effects.Send(ticket, to, request):
                self._senders[ticket] = to
                return _described(request, to)
            case effects.Mix(ticket):
                self._actions[ticket] = f"mixes {self._senders[ticket]}"
            case effects.Merge(ticket, into):
                verb = "takes in" if self._is_centre(into) else "mixes"
                self._actions[ticket] = f"{verb} {self._senders[ticket]}"
            case effects.ApplyWave(ticket):
                self._actions[ticket] = "takes the mean in"
            case effects.Adopt(ticket):
                self._actions[ticket] = f"adopts the model of {self._senders[ticket]}"
            case effects.Stop(reason):
                return f"must stop: {reason}"
            case effects.ReportOutcome(_, problem):
                return problem or "has switched the sync model"
            case effects.ReportEntry():
                self.entries.append(what)
        return ""

    def _is_centre(self, ticket: int) -> bool:
        """Whether a captured model is a hub's centre, rather than that of a wave."""
        exchange = self._peer.role.exchange
        return (
            isinstance(exchange, ElasticExchange) and exchange.centre is not None and exchange.centre.ticket == ticket
        )


class LoggedWorld(World[SimPeer]):
    """A world of real models with a transcript of each peer, whose lines are in its log.

    Attributes:
        transcripts: by rank, of the latest started incarnation.
        before_finish: by rank, its trained values when it entered the finish.
    """

    def __init__(self, seed: int, network: Network | None = None):
        super().__init__(seed, network)
        self.transcripts: dict[int, Transcript] = {}
        self.before_finish: dict[int, Tensor] = {}

    def start(self, rank: int, make: Callable[[int], SimPeer], at: float = 0.0) -> None:
        super().start(rank, functools.partial(self._logged, rank, make), at)

    def _logged(self, rank: int, make: Callable[[int], SimPeer], incarnation: int) -> SimPeer:
        peer = make(incarnation)
        self.transcripts[rank] = Transcript(peer)
        self.before_finish.pop(rank, None)
        return peer

    def note(self, rank: int, what: str) -> None:
        super().note(rank, what)
        peer = self.peers[rank]
        is_new = what == f"is {peer.role.stage.name}" and rank not in self.before_finish
        if is_new and messages.Stage.FINISH <= peer.role.stage < messages.Stage.LEFT:
            self.before_finish[rank] = peer.weights()

    def lines(self, rank: int, what: str = "") -> list[str]:
        """Return the log lines of ``rank`` that begin with ``what``."""
        return [entry.what for entry in self.log if entry.rank == rank and entry.what.startswith(what)]

    def retrievals(self, rank: int) -> list[MixedModel]:
        """Return the models that a peer has mixed, or merged in a wave, while training."""
        return self.transcripts[rank].retrievals

    def join(
        self, name: str, contacts: Sequence[int], make: Callable[[effects.ReportEntry], SimPeer], at: float
    ) -> None:
        """From ``at`` on a process asks peers in turn to admit it, and then starts as a peer; ``make`` returns it.

        Args:
            contacts: ranks to ask; a peer that another one names is asked next.
        """
        self._to_start += 1

        def ask() -> None:
            asked = list(contacts)
            for rank in asked:
                peer = self.peers.get(rank)
                if peer is None or peer.down_since is not None:
                    continue
                self._tell(rank, events.AskEntry(0, name, name, 29_400, name))
                entry = self.transcripts[rank].entries.pop()
                if entry.refusal:
                    self._to_start -= 1
                    self.note(rank, f"does not admit {name}: {entry.refusal}")
                    return
                if entry.rank is not None:
                    self.note(rank, f"admits {name} as {entry.rank}")
                    self._makers[entry.rank] = functools.partial(
                        self._logged, entry.rank, lambda _, entry=entry: make(entry)
                    )
                    self._start(entry.rank)
                    return
                if entry.elsewhere is not None and entry.elsewhere not in asked:
                    asked.append(entry.elsewhere)
            self.at(self.now + ASK_AGAIN, ask)

        self.at(at, ask)

    def poison(self, rank: int, start: float, end: float = math.inf) -> None:
        """Put a NaN into every model that ``rank`` sends from ``start`` to ``end``; its own weights are unchanged."""
        self.at(start, lambda: setattr(self.peers[rank], "changed", functools.partial(self._poisoned, rank)))
        if end < math.inf:
            self.at(end, lambda: setattr(self.peers[rank], "changed", lambda model: model))

    def _poisoned(self, rank: int, model: memoryview) -> memoryview:
        self.fired["poison"] += 1
        dtype = next(section.values.dtype for section in self.peers[rank].arena.sections if section.mixed)
        changed = memoryview(bytearray(model))
        typed(changed, dtype)[0] = math.nan
        return changed

    def switch_sync(
        self, rank: int, at: float, sync: str, shard: int | None = None, apply: str = "", pulls: str = ""
    ) -> None:
        """At ``at``, request on peer ``rank`` that a shard, or all (None), switch to another sync model."""
        self.at(at, lambda: self._tell(rank, events.SwitchSync(0, shard, sync, apply, pulls)))

    def change_servers(self, rank: int, at: float, servers: Sequence[int]) -> None:
        """At ``at``, request on peer ``rank`` that the shards move to other servers."""
        self.at(at, lambda: self._tell(rank, events.ChangeServers(0, tuple(servers))))

    def _tell(self, rank: int, event: events.Event) -> None:
        peer = self.peers[rank]
        peer.act(lambda: peer.handle(event))


def trained_bytes(peer: SimPeer) -> int:
    """Return the bytes of models and tables that a peer received while training."""
    return peer.driver.received_before(messages.Stage.AGREE) - peer.driver.received_before(messages.Stage.START)


def finish_bytes(peer: SimPeer) -> int:
    """Return the bytes of models that a peer received in the finish."""
    return peer.endpoint.bytes_received - peer.driver.received_before(messages.Stage.AGREE)


def centre_of(hub: SimPeer) -> Tensor:
    """Return the hub's elastic centre as one float64 vector of trained values."""
    assert isinstance(hub.role.exchange, ElasticExchange) and hub.role.exchange.centre
    centre = hub.driver.captures.hold(hub.role.exchange.centre.ticket)
    assert centre is not None
    rows = zip(hub.arena.sections, centre.vectors, strict=True)
    whole = torch.cat([vector[: section.trainable].double() for section, vector in rows])
    centre.release()
    return whole


_DESCRIBED: dict[type[messages.Request], str] = {
    messages.InitialRequest: "asks {} for the initial model",
    messages.PullRequest: "pulls {}",
    messages.PushRequest: "pushes to {}",
    messages.PairRequest: "asks {} to pair",
    messages.TakeRequest: "takes from {}",
    messages.ElasticRequest: "uploads its model to {}",
    messages.CentreRequest: "asks {} for the centre",
    messages.FinalRequest: "asks {} for the final model",
    messages.ReferenceRequest: "asks {} for its reference",
}


def _described(request: messages.Request, to: int) -> str:
    """Return the log line of a request for a model or an exchange; empty for other requests."""
    match request:
        case messages.RoundRequest(number):
            return f"meets {to} in round {number}"
        case messages.ShardRequest(wave):
            return f"sends {to} its code of wave {wave}"
        case messages.ShareRequest(wave, _, _, owner):
            return f"asks {to} for the mean of {owner} in wave {wave}"
    return _DESCRIBED.get(type(request), "").format(to)
