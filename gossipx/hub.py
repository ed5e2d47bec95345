"""Hub mode: elastic averaging with a central model, the centre x̃, that one peer holds (Adaptive Communication,
Algorithm 1, Eq. 1 and 2; Zhang et al., 2015).

When its policy fires, a worker sends its model x to the hub, and the reply carries the centre x̃ as it was before. At
the next step boundary after that the worker moves by α (x̃ − x), with x as it was sent. The hub merges the workers'
models one after the other (lines 5 and 6)::

    x̃ ← x̃ + β/p · (x_i − x̃)

Eq. 2 is the sum of that over all p workers. With β = p·α both sides move by the same difference, so the sum of worker
and centre is conserved, whatever steps were made meanwhile. With ``blocking`` training waits for the reply, so exactly
one step lies between: its gradient is of the same x as the difference, and then both are applied, as Algorithm 1 is
printed. The optimizer's momentum is unaffected. With Nesterov momentum this is EAMSGD (Zhang et al., Eq. 5 and 6),
except that the difference is taken at the point where torch keeps the weights and computes the gradient, x + δv.

A hub that trains is its own worker, through the same messages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossipx.errors import UsageError
from gossipx.peer.exchange import Exchange, PeerContext
from gossipx.peer.membership import Requests
from gossipx.peer.pulls import PullExchange
from gossipx.peer.server_role import Metrics, ServerRole
from gossipx.protocol import effects
from gossipx.protocol.events import Merged, Received
from gossipx.protocol.messages import BusyReply, CentreRequest, ElasticRequest, ModelReply, NotReadyReply, Reply
from gossipx.settings.modes import Elastic, Mode
from gossipx.specs import rank_of


def rank_of_hub(settings: Mode, names: Sequence[str]) -> int | None:
    """Return the rank of a run's hub; None: the run has none.

    Args:
        names: the names of all peers, by rank.

    Raises:
        UsageError: the hub is not a peer, nobody trains, or the centre would move past a worker's model.
    """
    if not isinstance(settings, Elastic):
        return None
    rank = rank_of(settings.hub, "--hub", names)
    workers = len(names) - settings.hub_only
    if not workers:
        raise UsageError("--hub-only leaves no peer that trains: give more peers, or leave it out")
    if settings.beta is not None and settings.beta > workers:
        raise UsageError(
            f"--beta {settings.beta:g} moves the centre past a worker's model: at most {workers}, 1 per worker"
        )
    return rank


@dataclass
class _Elastic:
    """Our exchange under way.

    Attributes:
        ticket: of the request; the centre that answers it is kept under the same number.
        has_centre: whether the centre has arrived.
        is_mixing: whether the Mix effect was returned.
    """

    ticket: int
    has_centre: bool = False
    is_mixing: bool = False


class ElasticExchange(Exchange, ServerRole):
    """The exchanges of one peer with the hub and, on the hub, its answers to the workers.

    Args:
        pulls: used while the hub does not answer.
        settings: of the run; the same on all peers.
        hub: its rank.
    """

    request_types = (ElasticRequest, CentreRequest)
    timers = PullExchange.timers

    def __init__(self, context: PeerContext, pulls: PullExchange, settings: Elastic, hub: int):
        super().__init__(context)
        self._pulls = pulls
        self._if_hub_lost = settings.hub_lost
        self._hub = hub
        self._is_hub = context.rank == hub
        workers = context.members.size - settings.hub_only
        self._alpha = settings.worker_share(workers)
        self.centre = Centre(context.requests, settings.centre_share(workers)) if self._is_hub else None
        self._numbers = itertools.count(1)
        self.trains = not (self._is_hub and settings.hub_only)
        self._initial: list[Received] = []  # requests that wait until our model is the centre
        self._current: _Elastic | None = None
        self._centre_ticket: int | None = None  # ticket of our CentreRequest, until its model is adopted

    @property
    def captured_ticket(self) -> int | None:
        return self._current.ticket if self._current else self._pulls.captured_ticket

    @property
    def over(self) -> bool:
        return self._current is None and self._pulls.over

    @property
    def is_needed_at_finish(self) -> bool:
        return self._is_hub

    # --- the worker -------------------------------------------------------------------------------

    def begin(self, now: float) -> list[effects.Effect]:
        if not self.trains:
            return []
        hub = self._context.members.others.get(self._hub)
        if hub is not None and not hub.may_be_asked(now):
            if self._if_hub_lost == "gossip":
                return self._pulls.begin(now)
            self._context.sync.skipped += 1
            return []
        self._context.sync.requested()
        patience = self._patience()
        request = ElasticRequest(self._context.incarnation, next(self._numbers), self._context.step, patience)
        send = self._context.requests.send(self._hub, request, now, now + patience)
        self._current = _Elastic(send.ticket)
        return [effects.Wait(), send] if self._context.blocking else [send]

    def _patience(self) -> float:
        members = self._context.members
        return members.model_timeout if self._is_hub else members.patience(self._hub)

    def replied(self, ticket: int, to: int, reply: Reply, now: float) -> list[effects.Effect]:
        if ticket == self._centre_ticket:
            if not isinstance(reply, ModelReply):
                return self._centre_failed(ticket, now)
            # The iterations of a peer that trains remain its own; a hub that does not has those of its centre.
            return [effects.Adopt(ticket, None if self.trains else reply.step)]
        current = self._current
        if current is None or current.ticket != ticket:
            return [effects.Forget(ticket)]
        if isinstance(reply, ModelReply):
            current.has_centre = True
            return [effects.Resume()] if self._context.blocking else []
        if isinstance(reply, NotReadyReply) and not self._is_hub:
            self._context.members.back_off(to, now)
        return self._request_failed(fault=not isinstance(reply, BusyReply))

    def failed(self, ticket: int, now: float) -> list[effects.Effect]:
        if ticket == self._centre_ticket:
            return self._centre_failed(ticket, now)
        if self._current is None or self._current.ticket != ticket:
            return [effects.Forget(ticket)]
        return self._request_failed(fault=True)

    def _request_failed(self, fault: bool) -> list[effects.Effect]:
        current, self._current = self._current, None
        assert current is not None
        return [effects.Forget(current.ticket), *self._give_up_decision(fault)]

    def mix(self, at_boundary: bool) -> effects.Mix | None:
        current = self._current
        if current is None:
            return self._pulls.mix(at_boundary)
        # Not earlier with blocking: the next gradient must be of the same x as the difference (Algorithm 1, lines 3, 5
        # and 8).
        if not (at_boundary or self._ending) or not current.has_centre or current.is_mixing:
            return None
        current.is_mixing = True
        return effects.Mix(current.ticket, self._alpha)

    def mixed(self, ticket: int) -> bool:
        if self._current is None or self._current.ticket != ticket:
            return self._pulls.mixed(ticket)
        self._current = None
        self._context.sync.completed()
        return True

    def timer_fired(self, name: str, now: float) -> list[effects.Effect]:
        return self._pulls.timer_fired(name, now)

    # --- the hub ----------------------------------------------------------------------------------

    def start_serving(self, now: float) -> list[effects.Effect]:
        return self.centre.begin() if self.centre else []

    @property
    def contributions(self) -> int:
        return self.centre.exchanges if self.centre else 0

    @property
    def metrics(self) -> Metrics:
        return {"hub/exchanges": (self.centre.step, self.centre.exchanges)} if self.centre else {}

    def requested(self, event: Received, now: float) -> list[effects.Effect]:
        if self.centre is None:
            return [self._answer(event.key, NotReadyReply("it is not the hub: give all peers the same --hub"), now)]
        worker = self._context.members.others.get(event.sender)
        if worker is not None and worker.suspended_until > now and isinstance(event.request, ElasticRequest):
            return [self._answer(event.key, NotReadyReply("the requester's last model held NaN or Inf"), now)]
        return self.centre.requested(event, now)

    def merged(self, event: Merged, now: float) -> list[effects.Effect] | None:
        if self.centre is None:
            return None
        sender = self.centre.merging
        taken = self.centre.merged(event, now)
        if taken is not None and not event.sound:
            assert sender is not None  # else the merge would not be the centre's
            if worker := self._context.members.others.get(sender):  # None: the hub's own model
                worker.suspended_until = now + self._context.timeout
        return taken

    def initial_model_requested(self, event: Received, now: float) -> list[effects.Effect] | None:
        """Make a hub that does not train answer with its centre, instead of its own initial model."""
        if self.trains or self.centre is None or not self.centre.ticket:
            return None
        self._initial.append(event)
        return self._ask_for_centre(now) if self._centre_ticket is None else []

    def peer_left(self, rank: int, now: float) -> list[effects.Effect]:
        return self.peer_lost(rank, now)

    def peer_lost(self, rank: int, now: float) -> list[effects.Effect]:
        if rank != self._hub or self._if_hub_lost != "stop":
            return []
        return [effects.Stop(f"the hub, peer {rank}, is gone, and --hub-lost is stop"), effects.Resume()]

    # --- the end ----------------------------------------------------------------------------------

    def end(self, now: float) -> list[effects.Effect]:
        self._ending = True
        return self._pulls.end(now)

    def drop(self, now: float) -> list[effects.Effect]:
        dropped = self._pulls.drop(now)
        current, self._current = self._current, None
        if current is not None:
            open_still = self._context.requests.is_open(current.ticket)
            dropped.append(effects.Cancel(current.ticket) if open_still else effects.Forget(current.ticket))
        self._context.sync.abandoned(failed=False)
        return dropped

    def fetch_final_model(self, now: float) -> list[effects.Effect] | None:
        """Adopt the centre, which is the final model of every peer."""
        hub = self._context.members.others.get(self._hub)
        if hub is not None and hub.silent:
            self.failed_source = self._hub
            return None
        return self._ask_for_centre(now)

    def _ask_for_centre(self, now: float) -> list[effects.Effect]:
        patience = self._patience()
        send = self._context.requests.send(self._hub, CentreRequest(patience), now, now + patience)
        self._centre_ticket = send.ticket
        return [send]

    def adopted(self, ticket: int, now: float) -> list[effects.Effect] | None:
        if ticket != self._centre_ticket:
            return None
        self._centre_ticket = None
        return self._answer_initial(now) if self._initial else [effects.Resume()]

    def _centre_failed(self, ticket: int, now: float) -> list[effects.Effect]:
        self._centre_ticket = None
        if self._is_hub:
            note = effects.Note("centre", "the hub's centre is not available: this peer keeps its own model")
            return [effects.Forget(ticket), note, *(self._answer_initial(now) if self._initial else [effects.Resume()])]
        self.failed_source = self._hub
        return [
            effects.Forget(ticket),
            effects.Note("centre", "the hub sent no centre: the mean of all models is used instead"),
        ]

    def _answer_initial(self, now: float) -> list[effects.Effect]:
        initial, self._initial = self._initial, []
        deadline = now + self._context.members.model_timeout
        return [effects.Answer(event.key, ModelReply(step=0), deadline, whole_model=True) for event in initial]


@dataclass
class _Waiting:
    """A worker's model that has arrived and is not yet merged."""

    event: Received
    ticket: int


class Centre:
    """The centre, held by the hub. Methods return the effects to carry out.

    Args:
        requests: the role's open requests, which allocate tickets.
        share: β/p, the share of the difference by which one exchange moves the centre.

    Attributes:
        exchanges: number of models merged.
        step: highest number of iterations that a merged model has seen.
        ticket: the captured model that is the centre; 0: none yet.
    """

    def __init__(self, requests: Requests, share: float):
        self.exchanges = 0
        self.step = 0
        self.ticket = 0
        self._requests = requests
        self._share = share
        self._latest: dict[int, tuple[int, int]] = {}  # by rank: incarnation and number of its last exchange
        self._merging: _Waiting | None = None
        self._waiting: deque[_Waiting] = deque()

    def begin(self) -> list[effects.Effect]:
        """Create the centre, as the run starts: the initial model, or the centre saved in a checkpoint."""
        if self.ticket:
            return []
        self.ticket = self._requests.ticket()
        return [effects.Capture(self.ticket, saved=True)]

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain data; the driver, which has its values, saves the centre itself."""
        return {"exchanges": self.exchanges, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore :meth:`state_dict`."""
        self.exchanges, self.step = state["exchanges"], state["step"]

    def requested(self, event: Received, now: float) -> list[effects.Effect]:
        """Handle an ElasticRequest or a CentreRequest."""
        assert isinstance(event.request, ElasticRequest | CentreRequest)
        if not self.ticket:
            # A worker may start before the last message of the START barrier reaches the hub.
            return [effects.Answer(event.key, BusyReply(), now + event.request.patience)]
        if isinstance(event.request, CentreRequest):
            return [
                effects.Answer(event.key, ModelReply(self.step), now + event.request.patience, captured=self.ticket)
            ]
        name = event.request.incarnation, event.request.number
        latest = self._latest.get(event.sender)
        if latest is not None and latest[0] == name[0] and latest[1] >= name[1]:
            return [effects.Answer(event.key, NotReadyReply("it has already merged that model"), now + 1)]
        self._latest[event.sender] = name
        ticket = self._requests.ticket()
        self._waiting.append(_Waiting(event, ticket))
        return [effects.Keep(event.key, ticket), *self._next(now)]

    @property
    def merging(self) -> int | None:
        """The rank of the worker whose model is being merged; None if none is."""
        return None if self._merging is None else self._merging.event.sender

    def merged(self, event: Merged, now: float) -> list[effects.Effect] | None:
        """Handle the end of a merge; it failed if the model holds NaN or Inf. Return None if the merge is not ours."""
        if self._merging is None or event.ticket != self._merging.ticket:
            return None
        self._merging = None
        self.exchanges += event.sound
        return self._next(now)

    def _next(self, now: float) -> list[effects.Effect]:
        """Start the next merge unless one is under way: each exchange must see the result of the one before."""
        if self._merging is not None or not self._waiting:
            return []
        waiting = self._waiting.popleft()
        request = waiting.event.request
        assert isinstance(request, ElasticRequest)
        self._merging = waiting
        self.step = max(self.step, request.step)
        reply, ticket = ModelReply(self.step), waiting.ticket
        # The answer comes before the merge, so it carries the centre as it was.
        given = effects.Answer(waiting.event.key, reply, now + request.patience, captured=self.ticket)
        return [given, effects.Merge(ticket, self.ticket, own=1 - self._share, theirs=self._share)]
