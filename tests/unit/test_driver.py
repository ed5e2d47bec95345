"""The driver's handling of captured models. The rest of the driver is tested end to end."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossipx.errors import CancelledError
from gossipx.figures import Counters
from gossipx.model.arena import ParameterArena
from gossipx.model.pool import HostBuffer
from gossipx.model.receive import Incoming
from gossipx.protocol.effects import Answer, Cancel, Capture, Effect, Forget, Mix, MoveReference, Send
from gossipx.protocol.events import Answered, Event, Failed, Fault, JoinRun, Mixed, Replied, Restored
from gossipx.protocol.messages import (
    AcceptReply,
    ModelReply,
    NotReadyReply,
    PullRequest,
    PushRequest,
    Stage,
    TakeRequest,
)
from gossipx.runtime.driver import Driver
from gossipx.runtime.driver.captures import Retrieval
from gossipx.settings.sections import ExchangeSettings, RunConfig


class Script:
    """A role stub: returns the effects that the test sets, and stores the events that it gets."""

    def __init__(self) -> None:
        self.rank = 0
        self.settings = RunConfig(exchange=ExchangeSettings(peer_timeout=30.0))
        self.stage = Stage.TRAIN
        self.pulling: int | None = None
        self.counts = Counters()
        self.sync = SimpleNamespace(policy=SimpleNamespace(uses_drift=False))
        self.next: list[Effect] = []
        self.told: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.told.append(event)
        effects, self.next = self.next, []
        return effects


class Comm:
    """A CommManager stub that stores requests and answers."""

    def __init__(self) -> None:
        self.bytes_received = 0
        self.requests: dict[object, Any] = {}
        self.answers: list[tuple[object, bytes | None]] = []
        self.posted = threading.Semaphore(0)

    def request(
        self, to: int, request: Any, *, deadline: float, payload: Incoming | None, done: Any, upload: object
    ) -> Any:
        self.requests[request] = payload, done
        self.posted.release()
        return lambda: done(CancelledError("it is cancelled"))

    def answer(
        self, key: object, reply: Any, *, payload: HostBuffer | None, deadline: float, done: Any, begins: float = 0.0
    ) -> None:
        self.answers.append((reply, None if payload is None else bytes(payload.view)))
        done(True)


class Bench:
    """A driver between the two stubs."""

    def __init__(self, sampled: int | None = None) -> None:
        self.module = nn.Linear(16, 1, bias=False)
        self.arena = ParameterArena(self.module, sampled=sampled)
        self.role, self.comm = Script(), Comm()
        self.driver = Driver(self.role, self.arena)  # type: ignore[arg-type]
        self.driver.comm = self.comm  # type: ignore[assignment]

    def do(self, *effects: Effect) -> None:
        self.role.next = list(effects)
        self.driver.handle(JoinRun())

    def step(self) -> bytes:
        """Make one step, and return the bytes of the model after it."""
        self.module.weight.data.add_(1.0)
        self.arena.step_done()
        return bytes(self.arena.snapshot().buffer.view)

    def reply(self, request: Any, reply: Any, model: bytes | None = None) -> None:
        """Answer the request."""
        assert self.comm.posted.acquire(timeout=10)
        payload, done = self.comm.requests[request]
        if model is not None:
            payload.take(0, memoryview(bytearray(model)))
        done(reply)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.driver.close()


OFFER, TAKE, PULL = PushRequest(1, 1), TakeRequest(1, 1), PullRequest(1, 30.0)


def test_an_answer_sends_the_captured_model_whatever_follows(bench: Bench):
    then = bench.step()
    bench.do(Capture(5), Send(5, 1, OFFER, math.inf))
    now = bench.step()
    assert now != then
    bench.reply(OFFER, AcceptReply())
    bench.do(Answer("a", ModelReply(0, 0.5), math.inf, captured=5), Answer("b", ModelReply(0), math.inf))
    assert bench.comm.answers == [(ModelReply(1, 0.5), then), (ModelReply(2), now)]


def test_bytes_belong_to_the_stage_in_which_they_arrive(bench: Bench):
    """START is over within one decision if this peer arrives last."""
    for stage, received in ((Stage.JOINING, 10), (Stage.TRAIN, 50), (Stage.TRAIN, 70), (Stage.FINISH, 80)):
        bench.role.stage, bench.comm.bytes_received = stage, received
        bench.do()
    bench.comm.bytes_received = 95
    before = {stage: bench.driver.received_before(stage) for stage in Stage}
    assert before == {**dict.fromkeys(Stage, 95), Stage.JOINING: 10, Stage.START: 50, Stage.TRAIN: 50, Stage.FINISH: 80}


@pytest.mark.parametrize("over", [Forget(5), MoveReference(5)])
def test_an_answer_is_sent_whatever_is_decided_meanwhile(bench: Bench, over: Effect):
    """The answer holds a reference to the model from the decision until it is sent."""
    then = bench.step()
    bench.do(Capture(5), Send(5, 1, OFFER, math.inf))
    bench.step()
    bench.do(over, Answer("a", ModelReply(0), math.inf, captured=5))
    assert bench.comm.answers == [(ModelReply(1), then)]
    assert not bench.driver.captures


def test_an_answer_finds_the_model_that_was_captured_in_the_same_decision(bench: Bench):
    """Another thread may carry out the answer before this one has sent the request."""
    bench.do(Capture(7), Answer("a", ModelReply(0), math.inf, captured=7), Send(7, 1, TAKE, math.inf))
    assert [type(reply) for reply, _ in bench.comm.answers] == [ModelReply]


@pytest.mark.fault(22)
def test_a_model_with_nan_fails_its_request(bench: Bench):
    """A pulled model is checked when it is mixed; here the other side relies on the mixing."""
    bench.do(Capture(5), Send(5, 1, TAKE, math.inf))
    bench.reply(TAKE, ModelReply(3), torch.tensor([1.0, math.nan] * 8).numpy().tobytes())
    assert bench.role.told[-1] == Failed(5, Fault.POISONED)


@pytest.fixture
def mid_step():
    """A driver within a step, whose arena keeps no copy of the last boundary."""
    made = Bench(sampled=0)
    made.arena.leave_boundary()
    yield made
    made.driver.close()


def answered(bench: Bench) -> None:
    """Wait until the outbox has processed its queue."""
    done = threading.Event()
    bench.driver.outbox.post(done.set)
    assert done.wait(10)


@pytest.mark.parametrize("captured", [False, True])
def test_a_request_within_a_step_is_answered_with_the_model_after_it(mid_step: Bench, captured: bool):
    held = [Capture(5)] if captured else []
    mid_step.do(*held, Answer("a", ModelReply(0), math.inf, captured=5 if captured else None))
    answered(mid_step)
    assert mid_step.comm.answers == [], "the weights may be changing"
    model = mid_step.step()
    answered(mid_step)
    assert mid_step.comm.answers == [(ModelReply(1), model)]


def test_a_request_is_sent_once_its_base_is_complete(mid_step: Bench):
    mid_step.do(Send(5, 1, PULL, math.inf))
    answered(mid_step)
    assert not mid_step.comm.requests
    before = mid_step.step()
    mid_step.reply(PULL, ModelReply(3), before)
    assert mid_step.role.told[-1] == Replied(5, ModelReply(3))
    assert mid_step.driver.models.received[5].distance == 0


@pytest.mark.parametrize("sent", [False, True])
def test_a_request_is_cancelled_after_or_before_it_is_sent(mid_step: Bench, sent: bool):
    mid_step.do(Send(5, 1, PULL, math.inf))
    if sent:
        mid_step.step()
        answered(mid_step)
    mid_step.do(Cancel(5))
    answered(mid_step)
    mid_step.step()
    answered(mid_step)
    assert len(mid_step.comm.requests) == sent
    assert mid_step.role.told.count(Failed(5, Fault.CANCELLED)) == 1
    mid_step.do(Forget(5))
    mid_step.do(Cancel(5))
    answered(mid_step)
    assert mid_step.role.told.count(Failed(5, Fault.CANCELLED)) == 1 and not mid_step.driver.models.received


def test_a_request_may_be_cancelled_while_another_thread_is_about_to_send_it(bench: Bench):
    """The effect that is decided first may be carried out last."""
    bench.do(Cancel(5))
    answered(bench)
    bench.do(Send(5, 1, PULL, math.inf))
    answered(bench)
    assert bench.role.told[-1] == Failed(5, Fault.CANCELLED) and not bench.comm.requests
    bench.do(Forget(5))
    assert not bench.driver.outbox._cancelled


def test_a_request_for_a_boundary_that_never_comes_fails(mid_step: Bench):
    mid_step.do(Answer("a", ModelReply(0), math.inf))
    mid_step.arena.end_training()
    answered(mid_step)
    mid_step.do(Answer("b", ModelReply(0), math.inf))
    assert mid_step.role.told.count(Answered("a", False)) == mid_step.role.told.count(Answered("b", False)) == 1
    refusal = "a model is sent at a step boundary, and training has ended before the next one"
    assert mid_step.comm.answers == [(NotReadyReply(refusal), None)] * 2


@pytest.mark.parametrize("request_", [TAKE, PULL], ids=["take", "pull"])
def test_a_model_mixed_while_training_is_a_retrieval(bench: Bench, request_: Any):
    found: list[Retrieval] = []
    bench.driver.on_retrieval = found.append
    bench.module.weight.data.zero_()
    bench.arena.set_boundary(4)
    bench.do(*([Capture(5)] if request_ is TAKE else []), Send(5, 1, request_, math.inf))
    bench.reply(request_, ModelReply(3), torch.full((16,), 2.0).numpy().tobytes())
    assert bench.role.told[-1] == Replied(5, ModelReply(3))
    bench.do(Mix(5, 0.25))
    assert bench.role.told[-1] == Mixed(5)
    assert [(one.staleness, one.distance) for one in found] == [(1, pytest.approx(2 * math.sqrt(16)))]
    assert bench.module.weight.flatten().tolist() == [0.5] * 16


def test_codecs_start_anew_once_exchanges_under_way_are_dropped(bench: Bench):
    told: list[Event] = []
    bench.driver.models.codec = SimpleNamespace(begin=lambda _: told.extend(bench.role.told))  # type: ignore
    bench.driver.load_state_dict({"iteration": 3, "sync": {}, "weight": 1.0, "draws": {}})
    assert told == [Restored(3, {}, 1.0, {})], "models that arrive before refer to the earlier weights"
