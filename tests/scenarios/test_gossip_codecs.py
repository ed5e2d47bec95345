"""Gossip with codecs, in virtual time, despite faults.

Pulls carry differences to a model that both ends have; waves average differences to a reference of all.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from encoded import SPECS, framed, normal
from modes import Delivered, deliveries
from seeds import some
from torch import Tensor, nn
from toy import ITERATIONS, SIZE, TIMEOUT, Point, before, bound, ended, maker, models, sgd, spread, until, world
from transcripts import LoggedWorld, trained_bytes

from gossipx import codecs
from gossipx.codecs.changes import FULL
from gossipx.compression import ModelCodec
from gossipx.errors import ProtocolError
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ModelReply, ShardRequest
from gossipx.sim import Network, SimPeer

GOSSIP = [spec for spec in SPECS if not codecs.parse(spec).gradients_only]
NEAR = "3lc:sparsity=1,residual=0.1"


def run(**options: Any) -> LoggedWorld:
    return ended(world(3, **options), 1000.0)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    return deliveries(monkeypatch)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("mode", ["pull", "push", "pushpull"])
@pytest.mark.parametrize("spec", some(GOSSIP, *GOSSIP[::6]))
def test_every_codec_in_every_mode(spec: str, mode: str, fragments: int, given: Delivered) -> None:
    """Each fragment has references of its own, which both ends of an exchange hold: no base is refused."""
    made = run(codec=spec, mode=mode, fragments=fragments, policy="tau:2", iterations=24)
    assert bool(models(made).isfinite().all())
    numbers = {codec.fragment.number for codec, *_ in given}
    assert spec == "none" or numbers == ({0} if fragments == 1 else {1, 2, 3})
    assert not any(is_whole for *_, is_whole in given)
    assert not any("cannot decode" in entry.what for entry in made.log)
    assert sum(len(made.retrievals(peer.rank)) >= fragments for peer in made.peers.values()) >= 2


@pytest.mark.parametrize("mode", ["pull", "push", "pushpull"])
@pytest.mark.parametrize("spec", [NEAR, "int8", "bf16"])
def test_models_converge_as_without_codecs(spec: str, mode: str) -> None:
    made, plain = run(codec=spec, mode=mode), run(mode=mode)
    far = float((before(plain) - before(plain).mean(0)).norm())
    assert float((before(made) - before(plain)).norm()) < 0.1 * far


@pytest.mark.parametrize("spec", [spec for spec in GOSSIP if codecs.parse(spec).alone])
def test_models_without_references(spec: str) -> None:
    """Without references: no peer keeps the model of another."""
    made, plain = run(codec=spec, references=0), run()
    assert float((before(made) - before(plain)).abs().max()) < 0.5
    assert all(
        not peer.driver.models.codec.of(0)._taken
        for peer in made.peers.values()
        if peer.driver.models.codec is not None
    )


@pytest.mark.parametrize("network", [Network(delay=0.01, loss=0.05), Network(delay=0.2, jitter=0.5, repeat=0.2)])
def test_messages_that_are_lost_late_or_twice(network: Network, given: Delivered) -> None:
    """Both ends still use the same reference, or else the model is sent in full: what is mixed is sound."""
    made = run(codec=NEAR, network=network, policy="tau:2")
    assert made.fired["lost"] + made.fired["repeated"] > 0
    assert sum(is_whole for *_, is_whole in given) < len(given) / 4
    plain = run(policy="tau:2")
    far = float((before(plain) - before(plain).mean(0)).norm())
    assert float((before(made).mean(0) - before(plain).mean(0)).norm()) < 0.5 * far


@pytest.mark.parametrize("again", [0, 1])
def test_a_late_or_restarted_peer_first_sends_and_receives_models_in_full(again: int, given: Delivered) -> None:
    """Even if its first model equals the common initial model, as one with the same seed does."""
    options = {"codec": "topk:ratio=0.05", "policy": "tau:2", "iterations": 40}
    made = world(3, absent=[2], **options)
    made.start(2, maker(2, 3, **options), at=5.5)
    made.crash(again, 8.2)
    made.restart(again, 9.1)
    before: list[int] = []
    made.at(9.1, lambda: before.append(len(given)))
    ended(made, 1000.0)
    assert made.fired["crash"] and made.fired["restart"]
    ranks = {
        peer.driver.models.codec.of(0): rank
        for rank, peer in made.peers.items()
        if peer.driver.models.codec is not None
    }
    first: dict[tuple[int, int], bool] = {}
    for sender, receiver, is_whole in given[before[0] :]:
        if sender in ranks:  # the surviving peers
            first.setdefault((ranks[sender], receiver), is_whole)
    to_and_from = [(sender, receiver) for sender, receiver in first if again in (sender, receiver)]
    assert len(to_and_from) == 4 and all(first[pair] for pair in to_and_from)
    assert any(not is_whole for *_, is_whole in given)


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("spec", ["3lc", "topk:ratio=0.1", "stochastic3", "int8"])
@pytest.mark.parametrize("size", [2, 4])
def test_an_encoded_pair_leaves_its_sum_as_it_was(size: int, spec: str, blocking: bool) -> None:
    """γ (x̂_j − x̂_i) is what one gains and the other loses (CHOCO-SGD, Algorithm 2), however coarse the codec is."""
    options = {"codec": spec, "mix": "choco:gamma=0.3", "mode": "pushpull", "policy": "tau:2", "iterations": 30}
    still = {"gradient_step": lambda peer: None, "blocking": blocking, "init": "own", "finish": "none"}
    network, paces = Network(bandwidth=400, delay=0.02), {rank: 1 + 0.1 * rank for rank in range(size)}
    made = ended(world(size, 1, network, paces, **options, **still), 1000.0)
    start = torch.stack([Point(rank).x.detach().double() for rank in range(size)])
    assert sum(len(made.retrievals(peer.rank)) for peer in made.peers.values()) >= 10
    assert float((models(made) - start).abs().max()) > 0.1
    torch.testing.assert_close(models(made).sum(0), start.sum(0), rtol=1e-5, atol=1e-5)


def test_more_neighbours_than_references(given: Delivered) -> None:
    """Many models are then sent in full; with as many references as neighbours only the first of each pair is."""
    options = {"codec": "topk:ratio=0.05", "policy": "tau:2", "init": "own", "iterations": 60}
    made = ended(world(6, references=2, **options), 5000.0)
    few = len(given)
    assert few / 4 < sum(is_whole for *_, is_whole in given) < few
    assert bool(models(made).isfinite().all())
    ended(world(6, references=5, **options), 5000.0)
    assert len(given) - few > 100 and sum(is_whole for *_, is_whole in given[few:]) <= 6 * 5


# --- one sender and its receivers -----------------------------------------------------------------------------------


class Two:
    """A sender and a receiver, ranks 0 and 1, of one model; or several receivers that share an arena."""

    def __init__(self, spec: str = "3lc", references: int = 8, begun: bool = True, receivers: int = 1):
        torch.manual_seed(0)
        self.modules = [nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)) for _ in range(2)]
        self.modules[1].load_state_dict(self.modules[0].state_dict())
        self.arenas = [ParameterArena(module) for module in self.modules]
        arenas = [self.arenas[0], *self.arenas[1:] * receivers]
        self.codecs = [ModelCodec(codecs.parse(spec), arena, references) for arena in arenas]
        for codec, arena in zip(self.codecs, arenas, strict=True):
            if begun:
                codec.begin(arena.snapshot().buffer.vectors)

    def train(self, seed: int) -> None:
        """Advance the sender's model."""
        for number, parameter in enumerate(self.modules[0].parameters()):
            parameter.data += 0.1 * normal(*parameter.shape, seed=100 * seed + number)
        self.arenas[0].step_done()

    def give(self, receiver: int = 1, bases: tuple[int, ...] | None = None) -> tuple[ModelReply, bytearray]:
        bases = self.codecs[receiver].bases(0) if bases is None else bases
        model = self.arenas[0].snapshot().buffer.vectors
        reply, source = self.codecs[0].give(receiver, bases, model, ModelReply(self.arenas[0].step))
        return reply, bytearray(source.view)

    def take(self, reply: ModelReply, content: bytearray, sender: int = 0, by: int = 1) -> Incoming:
        incoming = Incoming(self.arenas[1], None)
        model_sink = self.codecs[by].model_sink(sender, incoming)
        model_sink.fit(reply).take(0, memoryview(content))
        model_sink.decode()
        return incoming

    def off(self, incoming: Incoming) -> float:
        """Return the distance of the received model from the sender's, relative to the sender's last change."""
        (here,) = incoming.buffer.vectors
        (there,), (begun,) = (arena.snapshot().buffer.vectors for arena in self.arenas)
        cut = self.arenas[0].sections[0].trainable
        if incoming.compares:
            here = torch.cat((here[:cut] + begun[:cut], here[cut:]))
        return float((here - there).norm()) / float((begun - there).norm())


def test_the_common_first_model_is_a_reference_already() -> None:
    two = Two(NEAR)
    two.train(1)
    reply, content = two.give()
    assert FULL not in reply.bases
    assert len(content) < two.arenas[0].nbytes() / 2
    assert two.off(two.take(reply, content)) < 0.15


def test_losses_of_the_codec_are_in_the_next_difference() -> None:
    two = Two("3lc")
    two.train(1)
    off = [two.off(two.take(*two.give())) for _ in range(30)]
    assert off[-1] < 1e-3 < off[0]


def test_buffers_and_padding_between_tensors_are_sent_unchanged() -> None:
    two = Two("3lc")
    two.modules[0][1].running_mean += 3.0
    two.arenas[0].set_boundary(1)
    incoming = two.take(*two.give())
    cut = two.arenas[0].sections[0].trainable
    assert torch.equal(incoming.buffer.vectors[0][cut:], two.arenas[0].snapshot().buffer.vectors[0][cut:])


@pytest.mark.parametrize("restored", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("spec", ["3lc", "efsignsgd", "topk:ratio=0.1"])
def test_a_peer_whose_model_was_replaced_forgets_all_references(spec: str, restored: tuple[int, ...]) -> None:
    """Nothing of the earlier models enters the next exchange, which is of a whole model; the one after is encoded."""
    two = Two(spec)
    for seed in range(3):
        two.train(seed)
        two.take(*two.give())
    for module in two.modules:
        for parameter in module.parameters():
            parameter.data.fill_(10.0)
    for rank, arena in enumerate(two.arenas):
        arena.set_boundary(3)
        if rank in restored:
            two.codecs[rank].begin(None)
    cut = two.arenas[0].sections[0].trainable
    for is_whole in (True, False):
        reply, content = two.give()
        assert (FULL in reply.bases) is is_whole
        here, there = two.take(reply, content).buffer.vectors[0], two.arenas[0].snapshot().buffer.vectors[0]
        torch.testing.assert_close(here[:cut], there[:cut], rtol=1e-5, atol=1e-5)


def test_without_a_common_initial_model_it_is_sent_in_full_once() -> None:
    two = Two("3lc", begun=False)
    reply, content = two.give()
    assert set(reply.bases) == {FULL}
    assert reply.sizes == (4 * two.codecs[0].tensors[0].length,)
    assert torch.equal(two.take(reply, content).buffer.vectors[0], two.arenas[0].snapshot().buffer.vectors[0])
    assert FULL not in two.give()[0].bases


def test_ends_that_disagree_get_the_model_in_full() -> None:
    two = Two("3lc")
    two.train(1)
    two.take(*two.give())
    two.codecs[1]._taken[0].taken[0][5] += 1e-3  # a bit has flipped
    reply, content = two.give()
    assert set(reply.bases) == {FULL}
    assert two.off(two.take(reply, content)) == 0


def test_no_more_references_are_kept_than_are_wanted() -> None:
    """References to two peers, as of the last model sent to each, and to the common initial model."""
    two = Two("3lc", references=2, receivers=5)
    for receiver in range(1, 6):
        two.train(receiver)
        two.give(receiver)
    assert len(two.codecs[0]._changes[0]._bases) <= 2 * 2 + 1
    for sender in range(6):
        two.train(sender)
        two.take(*two.give(1, two.codecs[1].bases(sender)), sender=sender)
    assert list(two.codecs[1]._taken) == [4, 5]


def test_a_receiver_whose_reference_was_dropped_gets_the_model_in_full() -> None:
    """It is not sent as a difference to the initial model, most of which a single message would lose."""
    two = Two("topk:ratio=0.05", references=2)
    for sender in range(3):
        two.train(sender)
        assert FULL not in two.give(1, two.codecs[1].bases(sender))[0].bases
        two.take(*two.give(1, two.codecs[1].bases(sender)), sender=sender)
    reply, content = two.give(1, two.codecs[1].bases(0))
    assert set(reply.bases) == {FULL}
    assert two.off(two.take(reply, content, sender=0)) == 0


def test_as_many_peers_may_pull_as_references_are_kept() -> None:
    """Each gets differences, however many other peers pull in between."""
    receivers = range(1, 7)
    two = Two(NEAR, references=6, receivers=6)
    for turn in range(4):
        for receiver in receivers:
            two.train(10 * turn + receiver)
            reply, content = two.give(receiver)
            assert FULL not in reply.bases
            assert two.off(two.take(reply, content, by=receiver)) < 0.2
    assert len(two.codecs[0]._changes[0]._bases) <= 2 * 6 + 1


def test_a_reply_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    two = Two("3lc")
    two.train(1)
    reply, content = two.give()
    before = two.codecs[1].bases(0)
    for wrong in (
        msgspec.structs.replace(reply, sizes=()),
        msgspec.structs.replace(reply, sizes=(2**40,)),
        msgspec.structs.replace(reply, bases=(FULL,)),
        msgspec.structs.replace(reply, bases=()),
    ):
        with pytest.raises(ProtocolError, match="does not fit"):
            two.take(wrong, content)
    with pytest.raises(ProtocolError, match="a change from another base than this peer"):
        two.take(msgspec.structs.replace(reply, bases=(77,)), content)
    damaged = bytearray(content)
    damaged[20] ^= 1
    with pytest.raises(ProtocolError, match="codec's frame"):
        two.take(reply, damaged)
    assert two.codecs[1].bases(0) == before


def test_a_model_that_was_not_finite_does_no_lasting_harm() -> None:
    two = Two("3lc")
    two.train(1)
    two.take(*two.give())
    good = two.modules[0][0].weight.data.clone()
    two.modules[0][0].weight.data[0, 0] = float("nan")
    two.arenas[0].step_done()
    assert not bool(two.take(*two.give()).buffer.vectors[0].isfinite().all())
    two.modules[0][0].weight.data.copy_(good)
    two.arenas[0].step_done()
    assert bool(two.take(*two.give()).buffer.vectors[0].isfinite().all())


# --- waves --------------------------------------------------------------------------------------------------------

WAVES = {"exchange": "waves", "finish": "none"}
LARGE = 4 * 1024
"""Values of a model whose codes are much larger than their headers."""


def references(made: LoggedWorld) -> list[Tensor]:
    """Return the references of the waves, one of each fragment, which all peers must share bit for bit."""
    of_peers = [[codec._reference[0] for codec in peer.driver.waves.codecs.values()] for peer in made.peers.values()]
    for other in of_peers[1:]:
        assert all(map(torch.equal, of_peers[0], other))
    return of_peers[0]


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("spec", some(GOSSIP, *GOSSIP[::4]))
def test_every_codec_in_waves(spec: str, fragments: int) -> None:
    """The rest stays in the models, or with owners of shards: the sum of both changes by training alone."""
    own = torch.zeros(fragments * SIZE, dtype=torch.float64)

    def step(peer: SimPeer) -> None:
        was = peer.weights()
        sgd(peer.module)
        own.add_(peer.weights() - was)

    options = {"policy": "tau:2", "codec": spec, "fragments": fragments, **WAVES}
    made = ended(world(3, blocking=True, gradient_step=step, **options), bound(3, waits=3))
    start, left = maker(0, 3, fragments=fragments)(0).weights(), torch.zeros_like(own)
    for peer in made.peers.values():
        assert peer.role.sync.retrievals == 10 and peer.role.waves.lost == 0
        for codec, part in zip(peer.driver.waves.codecs.values(), left.split(SIZE), strict=True):
            for piece, values in zip(*(codec._residual or ((), ())), strict=True):
                part[piece.trained] += values
    torch.testing.assert_close(models(made).mean(0) + left, start + own / 3, rtol=0, atol=1e-5)
    assert len(references(made)) == fragments


@pytest.mark.parametrize("spec", ["none", "fp16", "efsignsgd"])
def test_a_wave_moves_each_code_of_a_shard_and_each_mean_once(spec: str) -> None:
    """2 (N - 1) / N codes per peer; those of a shard are as long as the frame of its values."""
    modules = {rank: {"module": Point(rank, LARGE)} for rank in range(4)}
    made = ended(world(4, policy="tau:5", blocking=True, codec=spec, by_rank=modules, **WAVES), bound(4))
    length = LARGE if spec == "none" else len(framed(spec, torch.randn(LARGE // 4)))
    for peer in made.peers.values():
        assert trained_bytes(peer) == 4 * 2 * 3 * length


@pytest.mark.parametrize("fragments", [1, 3])
def test_training_goes_on_during_a_wave(fragments: int) -> None:
    """A wave takes several steps, which are part of the next code; the finish is one of models."""
    options = {**WAVES, "codec": "int8", "finish": "consensus", "fragments": fragments, "model_timeout": 4 * TIMEOUT}
    made = ended(world(4, network=Network(bandwidth=8 * SIZE), policy="tau:5", **options), bound(4, waits=2))
    assert min(peer.role.sync.retrievals for peer in made.peers.values()) > 1
    references(made)
    assert spread(models(made)) < 1e-6


def test_peers_without_a_common_start_take_the_first_ones_reference() -> None:
    """Nothing is averaged in the first wave; later ones bring the models together."""
    options = {**WAVES, "codec": "int8", "init": "own", "policy": "tau:5", "blocking": True, "iterations": 30}
    made = ended(world(4, **options), bound(4, 30, waits=2))
    assert [peer.role.counts["references"] for peer in made.peers.values()] == [0, 1, 1, 1]
    references(made)
    assert spread(models(made)) < 0.1


@pytest.mark.parametrize("spec", ["none", "efsignsgd"])
def test_a_model_with_nan_is_refused(spec: str) -> None:
    def step(peer: SimPeer) -> None:
        if peer.rank == 1:
            peer.module.x.data[0] = torch.nan

    made = ended(world(4, policy="tau:4", gradient_step=step, codec=spec, **WAVES), bound(4, waits=5))
    assert models(made, [0, 2, 3]).isfinite().all()
    assert made.peers[1].arena.step == ITERATIONS


@pytest.mark.parametrize("place", [0, 1, 20, -1], ids=["kind", "header", "values", "end"])
def test_damaged_codes_and_means_are_left_out(place: int) -> None:
    """A frame of a codec has a checksum of its own. Peer 1 sends only damaged ones."""

    def damage(content: memoryview) -> memoryview:
        damaged = memoryview(bytearray(content))
        damaged[place] ^= 1
        return damaged

    made = until(world(3, policy="tau:4", codec="int8", **WAVES), 0, "step 2")
    made.peers[1].changed = damage
    ended(made, bound(3, waits=5))
    assert made.lines(0, "averages")[0] == made.lines(2, "averages")[0] == "averages the codes of (0, 2)"
    assert models(made).isfinite().all()
    assert all(made.peers[rank].role.counts["poisoned"] >= 2 for rank in (0, 2)), "a code and a mean"


@pytest.mark.parametrize("spec", ["none", "int8"])
def test_codes_of_impossible_sizes_are_refused(spec: str) -> None:
    peer = maker(0, 2, codec=spec, **WAVES)(0)
    longest = peer.driver.waves.codecs[0]._shard(0, 2)[0].longest
    for sizes in ((), (longest + 1,), (longest, 1), *(((longest - 1,),) if spec == "none" else ())):
        with pytest.raises(ProtocolError, match="does not fit"):
            peer.driver.sink_for(1, ShardRequest(1, (0, 1), 0, (1, 1), sizes, TIMEOUT))
    for sender, members, fragment in ((1, (1, 2), 0), (2, (0, 1), 0), (1, (0, 1), 7)):
        with pytest.raises(ProtocolError, match="takes no part in"):
            peer.driver.sink_for(sender, ShardRequest(1, members, fragment, (1, 1), (longest,), TIMEOUT))
