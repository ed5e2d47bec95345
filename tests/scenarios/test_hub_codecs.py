"""Elastic averaging with codecs, in virtual time: both sides move by the same difference, whatever the codec loses."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
import toy
from encoded import SPECS, normal
from seeds import some
from torch import Tensor, nn
from transcripts import LoggedWorld, centre_of

from gossipx import codecs
from gossipx.codecs.changes import FULL
from gossipx.compression import ElasticCodec
from gossipx.errors import ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ElasticRequest, ModelReply
from gossipx.settings.modes import Elastic
from gossipx.sim import Network

MODELS = [spec for spec in SPECS if not codecs.parse(spec).gradients_only]
NEAR = "3lc:sparsity=1,residual=0.1"
AROUND = Elastic(hub="0", alpha=0.25, hub_only=True)


def run(**options: Any) -> LoggedWorld:
    return toy.ended(toy.world(3, hub=AROUND, policy="tau:3", **options), 1000.0)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("spec", some(MODELS, *MODELS[::4]))
def test_every_codec(spec: str, trains: bool) -> None:
    around = dataclasses.replace(AROUND, hub_only=not trains)
    made = toy.ended(toy.world(3, hub=around, policy="tau:3", codec=spec), 1000.0)
    assert bool(toy.models(made).isfinite().all())
    assert made.peers[0].role.exchange.contributions >= 6 + 5 * trains


@pytest.mark.parametrize("spec", [NEAR, "int8", "bf16"])
def test_the_centre_converges_as_without_codecs(spec: str) -> None:
    order = {"slow": {2: 1.1}}  # in both runs the worker 1 uploads first
    made, plain, begun = run(codec=spec, **order), run(**order), toy.Point(0).x.detach().double()
    far = float((centre_of(plain.peers[0]) - begun).norm())
    assert float((centre_of(made.peers[0]) - centre_of(plain.peers[0])).norm()) < 0.1 * far


@pytest.mark.parametrize("spec", [NEAR, "3lc:sparsity=1.75", "topk:ratio=0.05", "signsgd"])
def test_what_codecs_leave_out_does_not_change_the_sum(spec: str) -> None:
    """Only gradients change Σ x_i + x̃ (β = p·α)."""

    def nothing(peer: toy.SimPeer) -> None:
        with torch.no_grad():
            peer.module.x += 0.0  # type: ignore[operator]

    options = {"codec": spec, "init": "own", "gradient_step": nothing, "iterations": 40, "blocking": spec == "signsgd"}
    made = toy.world(3, hub=AROUND, policy="tau:2", **options)
    begun = toy.Point(0).x.detach().double() + sum(toy.Point(rank).x.detach().double() for rank in (1, 2))
    toy.ended(made, 1000.0)
    assert made.peers[0].role.exchange.contributions >= 20
    ended = centre_of(made.peers[0]) + toy.before(made, (1, 2)).sum(0)
    torch.testing.assert_close(ended, begun, rtol=0, atol=1e-4)


@pytest.mark.parametrize("network", [Network(delay=0.01, loss=0.1), Network(delay=0.2, jitter=0.5, repeat=0.2)])
def test_messages_that_are_lost_late_or_twice(network: Network) -> None:
    made = run(codec=NEAR, network=network, iterations=60)
    assert made.fired["lost"] + made.fired["repeated"] > 0
    plain, begun = run(iterations=60), toy.Point(0).x.detach().double()
    far = float((centre_of(plain.peers[0]) - begun).norm())
    assert float((centre_of(made.peers[0]) - centre_of(plain.peers[0])).norm()) < 0.3 * far


def test_a_restarted_hub_gets_models_in_full() -> None:
    made = toy.world(3, hub=AROUND, policy="tau:2", codec=NEAR, iterations=60)
    made.crash(0, 10.3)
    made.restart(0, 20.1)
    toy.ended(made, toy.bound(3, 60, waits=6))
    assert made.fired["restart"] == 1
    for rank in (1, 2):
        assert [entry for entry in made.log if entry.rank == rank and entry.what == "mixes 0" and entry.time > 25]


# --- one hub and one worker -----------------------------------------------------------------------------------------


class Two:
    """A hub, rank 0, and a worker, rank 1, of one model."""

    def __init__(self, spec: str = "3lc", references: bool = True):
        torch.manual_seed(0)
        self.modules = [nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40)) for _ in range(2)]
        self.modules[1].load_state_dict(self.modules[0].state_dict())
        self.arenas = [ParameterArena(module) for module in self.modules]
        self.hub, self.worker = (
            ElasticCodec(codecs.parse(spec), arena, is_hub, references)
            for arena, is_hub in zip(self.arenas, (True, False), strict=True)
        )
        for codec, arena in zip((self.hub, self.worker), self.arenas, strict=True):
            codec.begin(arena.snapshot().buffer.vectors)
        self.number = 0

    def train(self, seed: int) -> None:
        """Advance the worker's model."""
        for number, parameter in enumerate(self.modules[1].parameters()):
            parameter.data += 0.1 * normal(*parameter.shape, seed=100 * seed + number)
        self.arenas[1].step_done()

    def x(self, rank: int) -> Tensor:
        return self.arenas[rank].snapshot().buffer.vectors[0][: self.arenas[rank].sections[0].trainable].clone()

    def bring(self) -> tuple[ElasticRequest, bytearray]:
        self.number += 1
        request, source = self.worker.bring(
            ElasticRequest(1, self.number, 1, 9.0), self.arenas[1].snapshot().buffer.vectors
        )
        return request, bytearray(source.view)

    def arrive(self, request: ElasticRequest, content: bytearray) -> tuple[Incoming, ModelReply, bytearray]:
        sink = self.hub.upload_sink(1, request, Incoming(self.arenas[0], None))
        sink.take(0, memoryview(content))
        sink.decode()
        reply, source = sink.answered(self.arenas[0].snapshot().buffer.vectors, ModelReply(1))
        return sink.incoming, reply, bytearray(source.view)

    def take(self, reply: ModelReply, content: bytearray) -> Tensor:
        """Return the difference by which the worker moves."""
        incoming = Incoming(self.arenas[1], self.arenas[1].snapshot())
        model_sink = self.worker.model_sink(incoming)
        model_sink.fit(reply).take(0, memoryview(content))
        model_sink.decode()
        incoming.norm()
        return incoming.buffer.vectors[0][: self.arenas[1].sections[0].trainable].clone()


@pytest.mark.parametrize("restored", ["hub", "worker", "both"])
def test_a_peer_whose_model_was_replaced_forgets_all_references(restored: str) -> None:
    """The next upload is of a whole model, and equal models do not move, whatever was kept of earlier ones."""
    two = Two("topk:ratio=0.1")
    for seed in range(3):
        two.train(seed)
        two.take(*two.arrive(*two.bring())[1:])
    for module, arena in zip(two.modules, two.arenas, strict=True):
        for parameter in module.parameters():
            parameter.data.fill_(10.0)
        arena.set_boundary(3)
    for codec in {"hub": [two.hub], "worker": [two.worker], "both": [two.hub, two.worker]}[restored]:
        codec.begin(None)
    try:
        request, content = two.bring()
        answer = two.arrive(request, content)[1:]
    except ProtocolError:  # the hub has another copy: the worker's next upload is of a whole model
        assert restored == "hub"
        request, content = two.bring()
        answer = two.arrive(request, content)[1:]
    assert set(request.bases) == {FULL}
    assert float(two.take(*answer).norm()) < 1e-4


@pytest.mark.parametrize("spec", ["3lc", NEAR, "topk:ratio=0.1", "onebit", "int8"])
@pytest.mark.parametrize("references", [True, False])
def test_both_move_by_one_difference(spec: str, references: bool) -> None:
    if not references and not codecs.parse(spec).alone:
        references = True
    two = Two(spec, references)
    for seed in range(3):
        two.train(seed)
        incoming, *answer = two.arrive(*two.bring())
        hubs = incoming.buffer.vectors[0][: two.arenas[0].sections[0].trainable] - two.x(0)
        assert float(hubs.norm()) > 0
        torch.testing.assert_close(two.take(*answer), -hubs, rtol=0, atol=1e-6)


def test_a_worker_sends_the_change_since_the_last_model_that_arrived() -> None:
    two = Two(NEAR)
    two.train(1)
    request, content = two.bring()
    assert FULL not in request.bases
    assert len(content) < two.arenas[1].nbytes() / 2
    *_, reply, answer = two.arrive(request, content)
    two.take(reply, answer)
    two.train(2)
    assert FULL not in two.bring()[0].bases


def test_a_worker_without_a_reply_sends_its_model_in_full() -> None:
    two = Two(NEAR)
    two.train(1)
    two.bring()  # the reply is lost
    request, content = two.bring()
    assert set(request.bases) == {FULL}
    assert request.sizes == (4 * two.worker.tensors[0].length,)
    two.take(*two.arrive(request, content)[1:])
    assert FULL not in two.bring()[0].bases


def test_a_change_of_an_unknown_base_is_refused_and_changes_nothing() -> None:
    two = Two("3lc")
    two.train(1)
    request, content = two.bring()
    two.hub._begun = None
    with pytest.raises(ProtocolError, match="a change from another base than this peer"):
        two.arrive(request, content)
    for wrong in (
        msgspec.structs.replace(request, sizes=(2**40,)),
        msgspec.structs.replace(request, sizes=(5, 5)),
        msgspec.structs.replace(request, bases=(FULL,)),
        msgspec.structs.replace(request, bases=()),
    ):
        with pytest.raises(ProtocolError, match="does not fit"):
            two.arrive(wrong, content)
    assert not two.hub._copies


def test_a_model_that_was_not_finite_does_no_lasting_harm() -> None:
    two = Two(NEAR)
    two.train(1)
    two.take(*two.arrive(*two.bring())[1:])
    good = two.modules[1][0].weight.data.clone()
    two.modules[1][0].weight.data[0, 0] = float("nan")
    two.arenas[1].step_done()
    incoming, *answer = two.arrive(*two.bring())
    assert not bool(incoming.buffer.vectors[0].isfinite().all())
    two.take(*answer)
    two.modules[1][0].weight.data.copy_(good)
    two.arenas[1].step_done()
    incoming, *answer = two.arrive(*two.bring())
    assert bool(incoming.buffer.vectors[0].isfinite().all()) and bool(two.take(*answer).isfinite().all())
