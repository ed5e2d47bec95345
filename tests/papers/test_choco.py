"""Koloskova, Stich, Jaggi, Decentralized Stochastic Optimization with Compressed Communication (2019): CHOCO."""

from __future__ import annotations

import pytest
import torch
import toy
from encoded import normal
from torch import Tensor, nn

from gossipx import codecs
from gossipx.compression import ModelCodec
from gossipx.model.arena import ParameterArena
from gossipx.model.receive import Incoming
from gossipx.protocol.messages import ModelReply

SIZE = 400


class Peer:
    """One of two peers that pull from each other."""

    def __init__(self, rank: int, spec: str, references: int = 8):
        self.module = nn.Linear(SIZE, 1, bias=False)
        self.module.weight.data.zero_()
        self.arena = ParameterArena(self.module)
        self.codec = ModelCodec(codecs.parse(spec), self.arena, references, seed=rank, public=True)
        self.codec.begin(self.arena.snapshot().buffer.vectors)
        self.rank = rank

    @property
    def x(self) -> Tensor:
        return self.module.weight.detach().view(-1)

    def train(self, by: Tensor) -> None:
        self.module.weight.data += by
        self.arena.step_done()

    def pull(self, other: Peer) -> Tensor:
        """Return the difference that is mixed, before it is multiplied by the share."""
        model = other.arena.snapshot()
        reply, source = other.codec.give(
            self.rank, self.codec.bases(other.rank), model.buffer.vectors, ModelReply(self.arena.step)
        )
        model.release()
        incoming = Incoming(self.arena, self.arena.snapshot())
        model_sink = self.codec.model_sink(other.rank, incoming)
        model_sink.fit(reply).take(0, memoryview(bytearray(source.view)))
        model_sink.decode()
        incoming.norm()
        compared = incoming.buffer.vectors[0].clone()
        incoming.release()
        return compared


@pytest.mark.parametrize("spec", ["3lc", "topk:ratio=0.1", "onebit", "int8"])
def test_what_is_mixed_is_the_difference_of_both_public_copies(spec: str) -> None:
    """Algorithm 2, lines 3 to 7: x̂ ← x̂ + Q(x − x̂) on either side, and x_i ← x_i + γ (x̂_j − x̂_i)."""
    first, second = Peer(0, spec), Peer(1, spec)
    codec = codecs.parse(spec)
    public = [torch.zeros(SIZE), torch.zeros(SIZE)]
    for step in range(6):
        for peer in (first, second):
            peer.train(normal(1, SIZE, seed=10 * step + peer.rank))
        public = [
            copy + codecs.decode(codec.encode(peer.x - copy, codec.init(copy))[0])
            for peer, copy in zip((first, second), public, strict=True)
        ]
        assert torch.allclose(first.pull(second), public[1] - public[0], atol=1e-5)
    assert not torch.allclose(public[1] - public[0], second.x - first.x, atol=0.1) or spec == "int8"


def test_a_model_that_comes_as_it_is_is_compared_with_ones_own_as_it_is() -> None:
    """After an eviction the model is sent in full: x̂_j = x_j, so x̂_i = x_i."""
    first, second = Peer(0, "3lc", references=1), Peer(1, "3lc", references=1)
    for seed, peer in enumerate((first, second)):
        peer.train(normal(1, SIZE, seed=seed))
    assert not torch.allclose(first.pull(second), second.x - first.x, atol=0.1)
    for other in (3, 4):
        second.train(normal(1, SIZE, seed=other))
        second.codec.give(other, (12345,), second.arena.snapshot().buffer.vectors, ModelReply(1))
    assert torch.allclose(first.pull(second), second.x - first.x, atol=1e-6)


def test_nothing_is_lost_between_as_many_as_references_are_kept_of() -> None:
    """Public copies of equal models stay equal, even with pulls from other peers in between."""
    first = Peer(0, "topk:ratio=0.1", references=7)
    others = [Peer(rank, "topk:ratio=0.1", references=7) for rank in range(1, 8)]
    for step in range(4):
        for peer in (first, *others):
            peer.train(normal(1, SIZE, seed=step))
        for other in others:
            assert float(first.pull(other).abs().max()) < 1e-6


def test_a_lagging_model_pulls_back_and_public_copies_do_not() -> None:
    """All peers make the same long steps, which mixing must not change; without CHOCO one pass of a codec does."""
    way = torch.randn(toy.SIZE, generator=torch.Generator().manual_seed(7))

    def reached(**options: str) -> float:
        def go(peer: toy.SimPeer) -> None:
            with torch.no_grad():
                peer.module.x += way  # type: ignore[operator]

        made = toy.ended(toy.world(3, policy="tau:2", gradient_step=go, init="own", **options), 1000.0)
        begun = torch.stack([toy.Point(rank).x.detach() for rank in range(3)]).mean(0)
        return float((toy.before(made).mean(0) - begun) @ way.double() / (toy.ITERATIONS * way.double().square().sum()))

    assert reached() == pytest.approx(1, abs=0.02)
    spec = "topk:ratio=0.05"
    assert reached(codec=spec) < 0.9
    assert reached(codec=spec, mix="choco:gamma=0.3") == pytest.approx(1, abs=0.03)


def test_peers_come_to_the_mean_by_a_tenth_of_the_values() -> None:
    """Theorem 2 (CHOCO-Gossip): with γ small enough for the codec, models converge linearly to their mean."""

    def nothing(peer: toy.SimPeer) -> None:
        pass

    options = {"policy": "tau:1", "gradient_step": nothing, "codec": "topk:ratio=0.1", "mix": "choco:gamma=0.1"}
    apart = [
        toy.spread(toy.before(toy.ended(toy.world(3, iterations=many, init="own", **options), 5000.0)))
        for many in (1, 60, 120)
    ]
    assert apart[1] < 0.5 * apart[0] and apart[2] < 0.5 * apart[1]
