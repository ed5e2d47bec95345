"""References of waves under loss, delay, crashes and partitions: equal or repaired, and no code is counted twice.

Each peer's model is its reference plus what it has not sent: x_i − r = its own training steps − its codes that r
counts, plus what was left of the means of its shard when the members changed.
:class:`Ledger` keeps both sides of that equation by itself, from what the codecs of the waves are told to do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from toy import SIZE, bound, ended, until, world

from gossipx.compression import WaveCodec
from gossipx.sim import Network, SimPeer

Mean = tuple[int, tuple[int, ...], int]
"""A mean of a shard: number and members of its wave, and its owner."""
CLOSE = {"rtol": 1e-4, "atol": 2e-4}


class Ledger:
    """The codes that the references of a run count, and the steps that its peers have made.

    Attributes:
        trained: by codec, the training steps since its last known difference, plus that difference.
        begun: by codec, the weights before the first step.
        taken: by codec, the means that its reference has taken in.
        counted: by mean, whose codes are in it.
        codes: by mean and rank, the code.
        repairs: number of references that were taken whole, and of those that had diverged.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.trained: dict[WaveCodec, torch.Tensor] = defaultdict(lambda: torch.zeros(SIZE, dtype=torch.float64))
        self.taken: dict[WaveCodec, frozenset[Mean]] = defaultdict(frozenset)
        self.counted: dict[Mean, tuple[int, ...]] = {}
        self.codes: dict[tuple[Mean, int], torch.Tensor] = {}
        self.repairs = [0, 0]
        self.begun: dict[WaveCodec, torch.Tensor] = {}
        self._of_reference: dict[tuple[int, int], frozenset[Mean]] = {}
        for name in ("encode", "end", "take"):
            monkeypatch.setattr(WaveCodec, name, self._watched(name, getattr(WaveCodec, name)))

    def _watched(self, name: str, method: Any) -> Any:
        def watched(codec: WaveCodec, *args: Any) -> Any:
            if codec._number != (0, 0):
                self._of_reference.setdefault(codec._number, self.taken[codec])
            carried = codec._carried
            begun = self.begun.get(codec, torch.zeros(SIZE))
            self._old = codec._reference[0].double() - self.sent(codec) if codec._reference else begun
            has_none = codec._number == (0, 0)
            result = method(codec, *args)
            if name == "encode" and has_none and codec._number != (0, 0):  # its own model is the reference
                self.trained[codec] -= codec._reference[0].double() - begun
            if carried is not None and codec._carried is None:  # what it owned, and has not sent to the others
                for piece, values in zip(*carried, strict=True):
                    self.trained[codec][piece.trained] += values
            getattr(self, f"_{name}")(codec, result, *args)
            return result

        return watched

    def _encode(self, codec: WaveCodec, result: Any, ticket: int, number: int, members: Any, *rest: Any) -> None:
        wave = codec._waves.get(ticket)
        for owner, shard in wave.shards.items() if wave is not None else ():
            (piece,), code = shard, torch.zeros(SIZE, dtype=torch.float64)
            code[piece.trained] = codec._decoded(shard, wave.codes[owner])[0][0].double()
            self.codes.setdefault(((number, members, owner), codec._rank), code)

    def _end(self, codec: WaveCodec, result: Any, ticket: int, *rest: Any) -> None:
        if (wave := codec._waves.get(ticket)) is not None:
            means = {(wave.number, tuple(wave.shards), owner): one[0] for owner, one in wave.means.items()}
            for mean, counted in means.items():
                assert self.counted.setdefault(mean, counted) == counted, "two means of one shard in one wave"
            self.taken[codec] |= means.keys()
            self._of_reference.setdefault(codec._number, self.taken[codec])

    def _take(self, codec: WaveCodec, result: Any, reply: Any, content: Any, model: Any, out: Any) -> None:
        self.taken[codec] = self._of_reference[reply.reference]
        self.repairs[not reply.follows] += 1
        if not reply.follows:  # two histories: what counts from here on is where the model stands
            moved = (out.vectors[0] - model[0])[:SIZE].double()
            self.trained[codec] += moved + self._old - codec._reference[0].double() + self.sent(codec)

    def sent(self, codec: WaveCodec) -> torch.Tensor:
        """Return the sum of the codes of a peer that its reference counts."""
        own = [mean for mean in self.taken[codec] if codec._rank in self.counted[mean]]
        return sum((self.codes[mean, codec._rank] for mean in own), torch.zeros(SIZE, dtype=torch.float64))

    def step(self, peer: SimPeer) -> None:
        """Move a model at random."""
        generator = torch.Generator().manual_seed(1000 * peer.rank + peer.step)
        move = torch.randn(SIZE, generator=generator) * 0.1
        was = peer.weights()
        self.begun.setdefault(peer.driver.waves.codecs[0], was)
        next(peer.module.parameters()).data.add_(move)
        self.trained[peer.driver.waves.codecs[0]] += peer.weights() - was

    def check(self, peer: SimPeer) -> None:
        """Check the equation for one peer, between two waves."""
        codec = peer.driver.waves.codecs[0]
        left = peer.weights() - codec._reference[0].double()
        torch.testing.assert_close(left, self.trained[codec] - self.sent(codec), **CLOSE)


FAULTS = st.one_of(
    st.tuples(st.just("crash"), st.integers(0, 5), st.floats(5, 50)),
    st.tuples(st.just("pause"), st.integers(0, 5), st.floats(5, 40), st.floats(0, 20)),
    st.tuples(st.just("cut"), st.integers(0, 5), st.floats(5, 40), st.floats(0, 20), st.integers(0, 5), st.booleans()),
)


@examples(150, few=12)
@given(
    size=st.integers(2, 6),
    codec=st.sampled_from(["none", "efsignsgd", "topk2:ratio=0.3"]),
    across=st.sampled_from(["none", "nesterov:lr=0.8,momentum=0.4"]),
    blocking=st.booleans(),
    faults=st.lists(FAULTS, max_size=3),
    paces=st.lists(st.sampled_from([1.0, 1.01, 1.3]), min_size=6, max_size=6),
    loss=st.sampled_from([0.0, 0.0, 0.03]),
    delay=st.sampled_from([0.001, 0.3]),
)
def test_nothing_is_counted_twice(size, codec, across, blocking, faults, paces, loss, delay):
    """x_i − r is what peer i has trained and r does not count, at the end of its training, whatever was lost."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        ledger = Ledger(monkeypatch)
        options = {"policy": "tau:4", "iterations": 80, "exchange": "waves", "finish": "none", "peer_timeout": 6.0}
        network = Network(bandwidth=4.0 * SIZE, delay=delay, loss=0 if blocking else loss)  # it would wait too often
        slow = dict(enumerate(paces[:size]))
        given = {"gradient_step": ledger.step, "codec": codec, "across": across, "blocking": blocking, **options}
        made = world(size, 0, network, slow, **given)
        made.run(4.0)
        crashed = set()
        for name, rank, at, *more in faults:
            rank %= size
            match name:
                case "crash":
                    crashed.add(rank)
                    made.crash(rank, at)
                case "pause":
                    made.pause(rank, at, at + more[0])
                case "cut":
                    network.cut([rank], [more[1] % size], at, at + more[0], one_way=more[2])
        ended(made, bound(size, 80, 1.3, waits=80))
        left = [rank for rank in range(size) if rank not in crashed]
        for rank in left:
            ledger.check(made.peers[rank])


@pytest.mark.parametrize("codec", ["none", "efsignsgd"])
def test_a_peer_whose_code_was_counted_unseen_subtracts_it(codec: str, monkeypatch: pytest.MonkeyPatch):
    """Cut off after it has sent its codes: the means count them, and it learns that with the next reference."""
    ledger = Ledger(monkeypatch)
    options = {"policy": "tau:4", "iterations": 60, "exchange": "waves", "finish": "none", "peer_timeout": 6.0}
    network = Network(bandwidth=4.0 * SIZE, delay=0.01)
    made = world(3, 0, network, gradient_step=ledger.step, codec=codec, **options)
    until(made, 0, "averages the codes of (0, 1, 2)")
    network.cut([2], [0, 1], made.now, made.now + 10, one_way=False)
    made.run(made.now + 30)
    assert made.fired["cut"] > 0 and made.peers[2].role.counts["references"] == 1
    assert ledger.repairs == [1, 0], "its reference was an earlier one of the others"
    ended(made, bound(3, 60, waits=8))
    for peer in made.peers.values():
        ledger.check(peer)


@pytest.mark.fault(5)
def test_both_sides_of_a_partition_count(monkeypatch: pytest.MonkeyPatch):
    """After it, one side takes the other's reference and keeps its models: the mean of all has the work of both."""
    ledger = Ledger(monkeypatch)
    options = {"policy": "tau:4", "iterations": 120, "exchange": "waves", "finish": "none", "peer_timeout": 4.0}
    network = Network(delay=0.01)
    made = world(4, 0, network, gradient_step=ledger.step, **options)
    network.cut([0, 1], [2, 3], 9.0, 60.0)
    made.run(59.0)
    assert made.peers[0].driver.waves.codecs[0]._number != made.peers[2].driver.waves.codecs[0]._number
    until(made, 0, "averages the codes of (0, 1, 2, 3)")
    made.run(100.0)
    numbers = {peer.driver.waves.codecs[0]._number for peer in made.peers.values()}
    assert len(numbers) == 1 and ledger.repairs == [0, 2], "two peers have taken the reference of the others"
    ended(made, bound(4, 120, waits=8))
