"""Waves of encoded changes in virtual time: all peers agree after each; where references differ, models are sent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from encoded import SPECS
from modes import Delivered, deliveries
from seeds import some
from torch import Tensor
from toy import ITERATIONS, SIZE, TIMEOUT, bound, ended, maker, models, spread, until, world

from gossipx import codecs
from gossipx.codecs import decode, encoder
from gossipx.codecs.changes import FULL
from gossipx.compression import WaveCodec
from gossipx.errors import LocalFaultError, ProtocolError
from gossipx.protocol.messages import ModelReply, RoundRequest
from gossipx.sim import Network, SimPeer

TOPK2 = "topk2:ratio=0.2,chunk=8"
WAVES = {"exchange": "waves", "codec": TOPK2, "finish": "none"}
PARSED = {spec: codecs.parse(spec) for spec in SPECS if spec != "none"}
CHANGES = [spec for spec, codec in PARSED.items() if not codec.gradients_only]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    return deliveries(monkeypatch, WaveCodec)


def sparse_loco(size: int, waves: int, period: int) -> Tensor:
    """Return the model of SparseLoCo's Algorithm 1 with an outer learning rate of 1, written out.

    θ ← θ − (1/N) Σ_r Q(β e_r + θ − y_r), where each y_r has trained from θ.
    """
    peers = [maker(rank, size)(0) for rank in range(size)]
    coding = encoder(codecs.parse(TOPK2))
    states = [coding.init(torch.zeros(SIZE), rank) for rank in range(size)]
    theta = maker(0, size)(0).weights().float()
    for _ in range(waves):
        total = torch.zeros(SIZE)
        for rank, peer in enumerate(peers):
            with torch.no_grad():
                peer.module.x.copy_(theta)
            for _ in range(period):
                peer._gradient_step(peer)
            frame, states[rank] = coding.encode(theta - peer.module.x.detach(), states[rank])
            total += decode(frame)
        theta = theta - total / size
    return theta


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_wave_is_a_step_of_sparse_loco(size: int, given: Delivered) -> None:
    made = ended(world(size, policy="tau:4", blocking=True, iterations=12, **WAVES), bound(size, 12, waits=3))
    rows = models(made)
    assert all(torch.equal(rows[0], row) for row in rows)
    torch.testing.assert_close(rows[0].float(), sparse_loco(size, 3, 4), rtol=1e-6, atol=1e-7)
    assert given and not any(is_whole for *_, is_whole in given)


@pytest.mark.parametrize("spec", some(CHANGES, *CHANGES[::4]))
def test_every_codec_of_changes(spec: str, given: Delivered) -> None:
    made = ended(world(3, policy="tau:2", blocking=True, **{**WAVES, "codec": spec}), bound(3, waits=10))
    rows = models(made)
    assert bool(rows.isfinite().all()) and spread(rows) == 0
    assert given and not any(is_whole for *_, is_whole in given)


@pytest.mark.parametrize("fragments", [1, 3])
def test_training_goes_on_during_a_wave(fragments: int, given: Delivered) -> None:
    """A wave takes several steps, which are part of the next change; the finish is one of models."""
    options = {**WAVES, "finish": "consensus", "fragments": fragments, "model_timeout": 4 * TIMEOUT}
    made = ended(world(4, network=Network(bandwidth=2 * SIZE), policy="tau:5", **options), bound(4, waits=2))
    assert given and not any(is_whole for *_, is_whole in given)
    assert spread(models(made)) < 1e-6


def test_a_wave_without_one_partner_is_followed_by_one_of_whole_models(given: Delivered) -> None:
    """A crashed peer returns with the model of another: it has no reference, and all have the same one after a wave."""
    options = {**WAVES, "policy": "tau:4", "iterations": 60, "blocking": True}
    made = world(4, **options)
    until(made, 2, "meets 3 in round 0 of wave 2")
    made.crash(3, made.now)
    made.start(3, maker(3, 4, **options), made.now + 5)
    until(made, 3, "is TRAIN")
    sent = len(given)
    ended(made, bound(4, 60, waits=8))
    rows = models(made)
    assert all(torch.equal(rows[0], row) for row in rows)
    wholes = [is_whole for *_, is_whole in given[sent:]]
    assert any(wholes), "the peer that came back has no reference"
    assert not any(wholes[-16:]), "later waves are encoded again"


def test_different_references_become_equal(given: Delivered) -> None:
    """With models of their own at first, the first wave is one of whole models, and the next is not."""
    options = {**WAVES, "init": "own", "policy": "tau:5", "blocking": True, "iterations": 10}
    made = ended(world(4, **options), bound(4, 10, waits=2))
    assert [is_whole for *_, is_whole in given] == [True] * 8 + [False] * 8
    assert spread(models(made)) == 0


def test_a_restored_peer_forgets_the_wave_that_it_was_in(given: Delivered) -> None:
    """A change that was encoded for an abandoned wave is not lost: the error is as it was before."""
    made = world(2, policy="tau:4", network=Network(bandwidth=2 * SIZE), peer_timeout=TIMEOUT, **WAVES)
    until(made, 0, "meets 1 in round 0 of wave 1")
    codec = made.peers[0].codec._waves[0]
    assert not any(state.kept["error"].any() for state in codec._states)
    made.crash(1, made.now)
    ended(made, bound(2, waits=4))
    assert not any(state.kept["error"].any() for state in codec._states), "no wave was completed"


def test_a_model_with_nan_is_refused() -> None:
    def step(peer: SimPeer) -> None:
        if peer.rank == 1:
            peer.module.x.data[0] = torch.nan

    made = ended(world(4, policy="tau:4", gradient_step=step, **WAVES), bound(4, waits=5))
    assert models(made, [0, 2, 3]).isfinite().all()
    assert made.peers[1].arena.step == ITERATIONS


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:5], "end within a header"),
        (lambda data: data[:-1], "are malformed"),
        (lambda data: data * 2, "are malformed"),
        (lambda data: b"", "not of the same peers"),
        (lambda data: b"\1" + data[1:], ""),
    ],
    ids=["cut in a header", "cut in a frame", "twice", "none", "of another rank"],
)
def test_malformed_changes_are_refused(change: Callable[[bytes], bytes], told: str) -> None:
    arena = maker(0, 2)(0).arena
    codec = WaveCodec(codecs.parse("int8"), arena, 0, 2)
    codec.begin([torch.zeros(SIZE)])
    codec.enter(1)
    request = codec.prepared(RoundRequest(1, 0, (0, 1)))
    reply, source = codec.give(1, request.bases, [torch.ones(SIZE)], ModelReply(5))
    content = change(bytes(source.view))
    reply = msgspec.structs.replace(reply, sizes=(len(content),))
    if not told:
        frames, (values, _) = codec.decoded(reply, memoryview(content))
        assert list(frames) == [1] and values.cast("B") == memoryview(torch.ones(SIZE).numpy()).cast("B")
        return
    with pytest.raises(ProtocolError, match=told):
        codec.decoded(reply, memoryview(content))


def test_a_change_from_another_reference_is_refused() -> None:
    one, other = (WaveCodec(codecs.parse("int8"), maker(rank, 2)(0).arena, rank, 2) for rank in range(2))
    for codec, start in ((one, torch.zeros(SIZE)), (other, torch.ones(SIZE))):
        codec.begin([start])
        codec.enter(1)
    bases = one.prepared(RoundRequest(1, 0, (0, 1))).bases
    reply, source = one.give(1, bases, [torch.ones(SIZE)], ModelReply(5))
    with pytest.raises(ProtocolError, match="a change from another model"):
        other.decoded(reply, source.view)
    reply, _ = one.give(1, other.prepared(RoundRequest(1, 0, (0, 1))).bases, [torch.ones(SIZE)], ModelReply(5))
    assert reply.bases == (FULL,)
    with pytest.raises(LocalFaultError, match="the wave is over"):
        one.give(2, bases, [torch.ones(SIZE)], ModelReply(5))
