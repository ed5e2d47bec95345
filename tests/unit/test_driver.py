"""What a driver does with models that are captured for an exchange. The rest of it is tested end to end."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gossipx import codecs
from gossipx.codecs.changes import FULL
from gossipx.compression import Coded, ElasticCodec, ModelCodec
from gossipx.errors import CancelledError
from gossipx.model.arena import ParameterArena
from gossipx.model.buffers import HostBuffer
from gossipx.model.receive import Incoming
from gossipx.protocol.effects import Answer, Cancel, Capture, Delivered, Effect, Forget, Keep, Merge, Mix, Send
from gossipx.protocol.events import Answered, Event, Failed, Fault, JoinRun, Merged, Mixed, Received, Replied
from gossipx.protocol.messages import (
    AcceptReply,
    BusyReply,
    ElasticRequest,
    ModelReply,
    NotReadyReply,
    PullRequest,
    PushRequest,
    TakeRequest,
)
from gossipx.runtime.captures import Retrieval
from gossipx.runtime.driver import Driver


class Script:
    """In a role's place: says what the test tells it to, and keeps what it was told."""

    def __init__(self) -> None:
        self.rank = 0
        self.pulling: int | None = None
        self.sync = SimpleNamespace(policy=SimpleNamespace(uses_drift=False))
        self.next: list[Effect] = []
        self.told: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.told.append(event)
        effects, self.next = self.next, []
        return effects


class Comm:
    """In a CommManager's place: keeps what it was given."""

    def __init__(self) -> None:
        self.requests: dict[object, Any] = {}
        self.answers: list[tuple[object, bytes | None]] = []
        self.posted = threading.Semaphore(0)

    def request(
        self, to: int, request: Any, *, deadline: float, payload: Incoming | None, done: Any, brought: object
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
    """A driver between a script and a comm."""

    def __init__(self, sampled: int | None = None) -> None:
        self.module = nn.Linear(16, 1, bias=False)
        self.arena = ParameterArena(self.module, sampled=sampled)
        self.role, self.comm = Script(), Comm()
        self.driver = Driver(self.role, self.arena)  # type: ignore[arg-type]
        self.driver.comm = self.comm  # type: ignore[assignment]

    def do(self, *effects: Effect) -> None:
        self.role.next = list(effects)
        self.driver.tell(JoinRun())

    def step(self) -> bytes:
        """One step; the bytes of the model as it is then."""
        self.module.weight.data.add_(1.0)
        self.arena.step_done()
        return bytes(self.arena.snapshot().buffer.view)

    def reply(self, request: Any, reply: Any, model: bytes | None = None) -> None:
        """The request was answered."""
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


def test_the_model_that_was_captured_is_given_whatever_came_after(bench: Bench):
    then = bench.step()
    bench.do(Capture(5), Send(5, 1, OFFER, math.inf))
    now = bench.step()
    assert now != then
    bench.reply(OFFER, AcceptReply())
    bench.do(Answer("a", ModelReply(0, 0.5), math.inf, captured=5), Answer("b", ModelReply(0), math.inf))
    assert bench.comm.answers == [(ModelReply(1, 0.5), then), (ModelReply(2), now)]


@pytest.mark.parametrize("over", [Forget(5), Delivered(5)])
def test_what_was_to_be_given_is_given_whatever_is_decided_meanwhile(bench: Bench, over: Effect):
    """The answer has hold of it from the decision on; afterwards nobody has."""
    then = bench.step()
    bench.do(Capture(5), Send(5, 1, OFFER, math.inf))
    bench.step()
    bench.do(over, Answer("a", ModelReply(0), math.inf, captured=5))
    assert bench.comm.answers == [(ModelReply(1), then)]
    assert not bench.driver.captures


def test_an_answer_finds_the_model_that_was_captured_in_the_same_decision(bench: Bench):
    """Another thread may carry it out before this one has sent the request."""
    bench.do(Capture(7), Answer("a", ModelReply(0), math.inf, captured=7), Send(7, 1, TAKE, math.inf))
    assert [type(reply) for reply, _ in bench.comm.answers] == [ModelReply]


def test_a_model_with_nan_is_told_before_it_is_settled(bench: Bench):
    """[22] A request that a pull makes is told of it when it is to be mixed; here the other side counts on it."""
    bench.do(Capture(5), Send(5, 1, TAKE, math.inf))
    bench.reply(TAKE, ModelReply(3), torch.tensor([1.0, math.nan] * 8).numpy().tobytes())
    assert bench.role.told[-1] == Failed(5, Fault.POISONED)


@pytest.fixture
def in_midst():
    """A driver whose arena keeps no boundary, in the midst of a step."""
    made = Bench(sampled=0)
    made.arena.go_on()
    yield made
    made.driver.close()


def answered(bench: Bench) -> None:
    """The outbox has done all that it was given so far."""
    done = threading.Event()
    bench.driver.outbox.post(done.set)
    assert done.wait(10)


@pytest.mark.parametrize("captured", [False, True])
def test_who_asks_in_the_midst_of_a_step_is_given_the_model_after_it(in_midst: Bench, captured: bool):
    held = [Capture(5)] if captured else []
    in_midst.do(*held, Answer("a", ModelReply(0), math.inf, captured=5 if captured else None))
    answered(in_midst)
    assert in_midst.comm.answers == [], "weights may be changing"
    model = in_midst.step()
    answered(in_midst)
    assert in_midst.comm.answers == [(ModelReply(1), model)]


def test_a_request_goes_out_when_there_is_something_to_compare_with(in_midst: Bench):
    in_midst.do(Send(5, 1, PULL, math.inf))
    answered(in_midst)
    assert not in_midst.comm.requests
    before = in_midst.step()
    in_midst.reply(PULL, ModelReply(3), before)
    assert in_midst.role.told[-1] == Replied(5, ModelReply(3))
    assert in_midst.driver.transfers._transfers[5].distance == 0


@pytest.mark.parametrize("sent", [False, True])
def test_a_request_is_cancelled_on_its_way_or_before_it_is_sent(in_midst: Bench, sent: bool):
    in_midst.do(Send(5, 1, PULL, math.inf))
    if sent:
        in_midst.step()
        answered(in_midst)
    in_midst.do(Cancel(5))
    answered(in_midst)
    in_midst.step()
    answered(in_midst)
    assert len(in_midst.comm.requests) == sent
    assert in_midst.role.told.count(Failed(5, Fault.CANCELLED)) == 1
    in_midst.do(Forget(5))
    in_midst.do(Cancel(5))
    answered(in_midst)
    assert in_midst.role.told.count(Failed(5, Fault.CANCELLED)) == 1 and not in_midst.driver.transfers._transfers


def test_a_request_may_be_cancelled_while_another_thread_is_about_to_send_it(bench: Bench):
    """What is decided first may be carried out last."""
    bench.do(Cancel(5))
    answered(bench)
    bench.do(Send(5, 1, PULL, math.inf))
    answered(bench)
    assert bench.role.told[-1] == Failed(5, Fault.CANCELLED) and not bench.comm.requests
    bench.do(Forget(5))
    assert not bench.driver.outbox._cancelled


def test_who_waits_for_a_boundary_that_does_not_come_is_told(in_midst: Bench):
    in_midst.do(Answer("a", ModelReply(0), math.inf))
    in_midst.arena.give_up()
    answered(in_midst)
    in_midst.do(Answer("b", ModelReply(0), math.inf))
    assert in_midst.role.told.count(Answered("a", False)) == in_midst.role.told.count(Answered("b", False)) == 1
    refusal = "a model is sent at a step boundary, and training has ended before the next one"
    assert in_midst.comm.answers == [(NotReadyReply(refusal), None)] * 2


@pytest.mark.parametrize("request_", [TAKE, PULL], ids=["take", "pull"])
def test_what_is_mixed_while_training_is_a_retrieval(bench: Bench, request_: Any):
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


# --- a hub by codecs ------------------------------------------------------------------------------------------------


class Around:
    """A hub's driver, and the codec of a worker of the same model."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        codec = codecs.parse("3lc")
        self.hub = ElasticCodec(codec, bench.arena, is_hub=True)
        self.module = nn.Linear(16, 1, bias=False)
        self.module.load_state_dict(bench.module.state_dict())
        self.arena = ParameterArena(self.module)
        self.worker = ElasticCodec(codec, self.arena, is_hub=False)
        bench.driver.transfers.codec = Coded(ModelCodec(codec, bench.arena, 8), self.hub)
        bench.driver.begin_codec()
        self.worker.begin(self.arena.snapshot().buffer.vectors)
        self.module.weight.data += torch.arange(16.0)
        self.arena.step_done()

    def bring(self, key: int = 1) -> ElasticRequest:
        """As the CommManager would of a request ``key`` of peer 1."""
        request, source = self.worker.bring(ElasticRequest(1, key, 1, 5.0), self.arena.snapshot().buffer.vectors)
        room = self.bench.driver.uploads.room_for(1, request)
        room.take(0, source.view)
        self.bench.driver.received(1, key, request, room)
        return request


def test_a_hub_answers_by_the_difference_that_it_moves_by(bench: Bench):
    around = Around(bench)
    before = bench.module.weight.detach().clone()
    bench.do(Capture(100))
    bench.role.next = [Keep(1, 7), Answer(1, ModelReply(0), math.inf, captured=100, differs=7), Merge(7, 100, 0.5, 0.5)]
    request = around.bring()
    assert bench.role.told[-1] == Merged(7, 100, True)
    ((reply, content),) = bench.comm.answers
    incoming = Incoming(around.arena, around.arena.snapshot())
    model_sink = around.worker.model_sink(incoming)
    model_sink.fit(reply).take(0, memoryview(bytearray(content or b"")))
    model_sink.decode()
    incoming.norm()
    centre = bench.driver.captures.hold(100)
    assert centre is not None
    moved = centre.buffer.vectors[0][:16] - before.view(-1)
    assert float(moved.norm()) > 0
    torch.testing.assert_close(incoming.buffer.vectors[0][:16], -2 * moved)  # β/p is a half
    assert FULL not in request.bases and Received(1, 1, request) in bench.role.told


def test_what_changes_a_model_that_a_hub_has_not_is_told_busy_and_takes_no_room(bench: Bench):
    """For as often as it comes: the role hears nothing of it, and the next model comes whole."""
    around = Around(bench)
    around.hub._begun = None
    told = len(bench.role.told)
    for key in range(1, 40):  # more than there are places
        around.worker.begin(around.arena.snapshot().buffer.vectors)
        around.bring(key)
    assert bench.comm.answers == [(BusyReply(), None)] * 39
    assert all(isinstance(event, Answered) for event in bench.role.told[told:])
    assert set(around.bring(40).bases) == {FULL}
    assert isinstance(bench.role.told[-1], Received)
