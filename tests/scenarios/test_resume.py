"""Peers that resume from checkpoints, in virtual time: their first models, and that decisions are repeatable."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from toy import TIMEOUT, Point, bound, ended, make, resume, sgd
from transcripts import LoggedWorld

from gossipx.peer import PeerRole
from gossipx.protocol.effects import Effect, Mix, Send
from gossipx.protocol.events import Event, Failed, Fault, JoinRun, Mixed, Received, Replied, Restored, StepDone
from gossipx.protocol.messages import (
    AcceptReply,
    ArriveRequest,
    HereReply,
    ModelReply,
    PushRequest,
    SettleRequest,
    Stage,
)

SIZE = 5


def role(seed: int, policy: str, schedule: str, mode: str) -> PeerRole:
    return make(0, SIZE, seed, policy=policy, schedule=schedule, draws=seed, mode=mode).role


def joined(made: PeerRole, resumed: bool) -> PeerRole:
    """Let a peer join a run in which all others are training already."""
    for effect in made.handle(JoinRun(resumed), 0.0):
        if isinstance(effect, Send) and isinstance(effect.request, ArriveRequest):
            made.handle(Replied(effect.ticket, HereReply(Stage.TRAIN)), 0.0)
    return made


class Play:
    """A script of steps and replies for a role, which records what the role does. It is deterministic."""

    def __init__(self, made: PeerRole, step: int):
        self.role, self.step, self.now = made, step, 10.0 * step
        self.done: list[Any] = []
        self._open: list[Send] = []

    def steps(self, count: int, draws: random.Random, faults: bool) -> list[Any]:
        """Run ``count`` iterations of ten seconds each; every request gets its reply at once, except every fifth."""
        for _ in range(count):
            self.step += 1
            self.now = 10.0 * self.step
            self._tell(StepDone(self.step, draws.uniform(0, 2), draws.uniform(0, 2)))
            while self._open:
                send = self._open.pop(0)
                self.now += 0.01 * (1 + send.to)
                if faults and draws.random() < 0.2:
                    self._tell(Failed(send.ticket, Fault.TIMEOUT))
                else:
                    self._answer(send)
        return self.done

    def _tell(self, event: Event) -> None:
        for effect in self.role.handle(event, self.now):
            self._take(effect)

    def _take(self, effect: Effect) -> None:
        match effect:
            case Send(_, to, request, deadline):
                self.done.append((self.step, type(request).__name__, to, round(deadline - self.now, 9)))
                self._open.append(effect)
            case Mix(ticket, share):
                self.done.append((self.step, "Mix", share))
                self._tell(Mixed(ticket))
            case _:
                self.done.append((self.step, type(effect).__name__))

    def _answer(self, send: Send) -> None:
        match send.request:
            case ArriveRequest():
                self._tell(Replied(send.ticket, HereReply(Stage.TRAIN)))
            case PushRequest(_, number):
                self._tell(Replied(send.ticket, AcceptReply()))
                taken = SettleRequest(self.role.incarnation, number, taken=True)
                self._tell(Received(send.to, f"settle {number}", taken))
            case _:
                self._tell(Replied(send.ticket, ModelReply(self.step - 1)))


@pytest.mark.parametrize("schedule", ["random", "one-peer", "bandwidth-aware"])
@pytest.mark.parametrize("policy", ["tau:2", "random:p=0.4", "adaptive:threshold=0.5", "drift:distance=1"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_given_the_same_messages_it_takes_the_same_decisions(mode: str, policy: str, schedule: str) -> None:
    """A role whose state went through JSON exchanges at the same times, with the same peers and deadlines."""
    first = joined(role(1, policy, schedule, mode), True)
    play, draws = Play(first, 0), random.Random(5)
    play.steps(20, draws, faults=False)
    while first.sync.in_flight or first.pulling is not None:
        play.steps(1, draws, faults=False)
    play.done.clear()
    state = json.loads(
        json.dumps({"sync": first.sync.state_dict(), "weight": first.weight, "draws": first.training.draw_state()})
    )

    again = role(2, policy, schedule, mode)
    assert again.handle(Restored(play.step, state["sync"], state["weight"], state["draws"]), 0.0) == []
    other = Play(joined(again, True), play.step)
    expected = play.steps(40, random.Random(6), faults=True)
    assert other.steps(40, random.Random(6), faults=True) == expected
    assert len({entry[2] for entry in expected if entry[1] in ("PullRequest", "PushRequest")}) > 1
    assert any(entry[1] in ("Mix", "MoveReference") for entry in expected)
    assert again.training.draw_state() == first.training.draw_state()
    assert again.sync.state_dict() == first.sync.state_dict()


# --- the first model ------------------------------------------------------------------------------------

DONE = 7
"""Iterations that the checkpoints of these runs have seen."""


def of_a_checkpoint(rank: int, value: float) -> Point:
    """Return a peer's model with the values of a checkpoint."""
    module = Point(rank)
    module.x.data.fill_(value)
    return module


def first_steps(made: LoggedWorld) -> dict[int, str]:
    """Return the first step of each peer, by rank."""
    found: dict[int, str] = {}
    for entry in made.log:
        if entry.what.startswith("step "):
            found.setdefault(entry.rank, entry.what)
    return found


@pytest.mark.parametrize("late", [0.0, 3.0])
@pytest.mark.parametrize("without", [0, 1, 2])
@pytest.mark.fault(37)
def test_peers_keep_the_model_of_a_checkpoint_and_others_adopt_one(without: int, late: float) -> None:
    """Rank 0 too, even if it arrives before the peers that have one: it never starts with a new model."""
    made, options = LoggedWorld(0), {"policy": "never", "finish": "none"}
    resume(made, without, 3, None, **options)
    for rank in {0, 1, 2} - {without}:
        resume(made, rank, 3, DONE, late, module=of_a_checkpoint(rank, rank), **options)
    ended(made, bound(3))
    assert first_steps(made) == dict.fromkeys(range(3), f"step {DONE + 1}")
    sender = min({0, 1, 2} - {without})
    expected = {rank: float(sender if rank == without else rank) for rank in range(3)}
    for rank, value in expected.items():
        alone = of_a_checkpoint(rank, value)
        for _ in range(made.peers[rank].iterations - DONE):
            sgd(alone)
        assert torch.equal(made.peers[rank].weights(), alone.x.detach().double()), rank


def test_without_any_checkpoint_no_peer_starts() -> None:
    made = LoggedWorld(0)
    for rank in range(3):
        resume(made, rank, 3, None)
    made.run(10 * TIMEOUT)
    assert first_steps(made) == {}
    for peer in made.peers.values():
        assert peer.reason is not None and "no peer sent the model of a checkpoint within peer_timeout" in peer.reason
