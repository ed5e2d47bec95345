"""Outer optimizers under loss, NaN, late arrival and restart: a failed exchange leaves no trace in their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import PAIRS, agree, nothing_left, slow
from toy import ITERATIONS, bound, ended, models, spread, until, world

from gossipx.sim import SimPeer

MOMENTUM = {"across": "momentum:0.6"}
WAVES = {"exchange": "waves"}
NESTEROV = {"across": "nesterov", **WAVES}
PARTS = {"fragments": 3}
KINDS: list[dict[str, Any]] = [
    MOMENTUM,
    {**MOMENTUM, **PAIRS},
    {**MOMENTUM, **WAVES},
    NESTEROV,
    {**MOMENTUM, **PAIRS, **PARTS},
    {**NESTEROV, **PARTS},
]
NAMES = ["pulls", "pairs", "waves", "nesterov", "pairs in parts", "nesterov in parts"]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=NAMES)


def kept(peer: SimPeer) -> list[torch.Tensor]:
    """Return copies of the vectors that a peer's outer optimizer keeps, of all fragments."""
    if codecs := [codec for codec in peer.driver.waves.codecs.values() if codec._outer is not None]:
        return [vector.clone() for codec in codecs for vector in (*codec._reference, *codec._velocity)]
    outers = [fragment.outer for fragment in peer.arena.fragments if fragment.outer is not None]
    assert len(outers) == len(peer.arena.fragments)
    return [vector.clone() for one in outers for vector in one.vectors()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@every_kind
def test_without_faults_all_agree(kind: dict[str, Any]):
    made = ended(world(4, policy="tau:3", **kind), bound(4))
    agree(made, [0, 1, 2, 3])
    nothing_left(made)
    assert all(kept(peer) for peer in made.peers.values()), "every peer has exchanged with momentum"


@pytest.mark.fault(69)
@pytest.mark.parametrize("lost", [True, False], ids=["partner lost", "NaN"])
@every_kind
def test_a_failed_exchange_leaves_no_trace(kind: dict[str, Any], lost: bool):
    """The state after it is the state before it, bit by bit."""
    options = {"policy": "tau:5", "iterations": 14, "gradient_step": lambda peer: None, "init": "own", **kind}
    if kind["across"] == "nesterov":
        options.pop("init")
    made = world(2, network=slow(0.01), **options)
    until(made, 0, "takes the mean in" if "exchange" in kind else "mixes")
    made.run(made.now + 2)
    before, weights = kept(made.peers[0]), made.peers[0].weights()
    assert before
    if lost:
        made.crash(1, 10.6)  # both exchange at step 10
    else:
        made.poison(1, made.now)
    ended(made, bound(2, 14, waits=8))
    assert made.fired["crash" if lost else "poison"] > 0
    assert same(kept(made.peers[0]), before)
    assert torch.equal(made.peers[0].weights(), weights)


@pytest.mark.fault(69)
@every_kind
def test_a_peer_that_returns_begins_anew(kind: dict[str, Any]):
    """It adopts another peer's model, and its first exchange then has no momentum; all agree in the finish."""
    made = world(3, policy="tau:4", **{"iterations": 40, **kind})
    made.crash(2, 9.5)
    made.restart(2, 15.2)
    made.run(15.5)
    assert len(made.lines(2, "adopts")) == 2
    assert kept(made.peers[2]) == []  # neither momentum nor a reference
    ended(made, bound(3, 40, waits=4))
    assert kept(made.peers[2])
    agree(made, [0, 1, 2])
    assert spread(models(made)) < 1e-5


def test_a_peer_that_returns_gets_the_momentum_of_the_others():
    """Nesterov: it fetches reference and momentum whole, and holds both bit for bit from then on."""
    options = {"policy": "tau:2", "iterations": 40, "finish": "none", "blocking": True, **NESTEROV}
    made = world(2, **options)
    made.crash(1, 20.5)
    made.restart(1, 21.0)
    until(made, 1, "asks 0 for its reference")
    made.run(made.now + 6)
    assert same(kept(made.peers[0]), kept(made.peers[1])) and any(bool(one.any()) for one in kept(made.peers[0])[1:])


@pytest.mark.parametrize("kind", [*KINDS[:3], KINDS[4]], ids=[*NAMES[:3], NAMES[4]])
def test_momentum_is_not_drift(kind: dict[str, Any]):
    """A peer that does not train drifts nowhere, however far momentum moves it."""

    def retrievals(policy: str) -> int:
        options = {"policy": policy, "iterations": ITERATIONS, "init": "own", "gradient_step": lambda peer: None}
        return ended(world(2, **options, **kind), bound(2, waits=4)).peers[0].role.sync.retrievals

    assert retrievals("drift:distance=0.01,max_silence=4") == retrievals("never:max_silence=4") > 1
