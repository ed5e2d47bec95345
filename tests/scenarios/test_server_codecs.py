"""Runs with servers and codecs, in virtual time: every codec in both directions, and faults that affect its state."""

from __future__ import annotations

from typing import Any

import pytest
import served
import torch
from encoded import SPECS
from seeds import some
from torch import Tensor
from transcripts import LoggedWorld

from gossipx import codecs
from gossipx.codecs.changes import FULL, Changes, SharedFrame
from gossipx.sim import Network


def loss(made: LoggedWorld) -> float:
    """Return the first peer's loss over all batches of a run."""
    module = next(iter(made.peers.values())).module
    pairs = [served.batch(rank, iteration) for rank in range(3) for iteration in range(served.ITERATIONS)]
    with torch.no_grad():
        return float(torch.stack([(module(x) - y).square().mean() for x, y in pairs]).mean())


def held(made: LoggedWorld) -> Tensor:
    """Return the servers' values, concatenated."""
    tables = [made.peers[shard].table_store.state_dict(shard)["store"]["values"] for shard in range(2)]
    return torch.cat([values for shard in tables for values in shard])


def run(**options: Any) -> LoggedWorld:
    return served.ended(served.world(3, servers="0,1", **options), limit=3000.0)


def pulled(spec: str) -> str:
    return "none" if codecs.parse(spec).gradients_only else spec


SYNCS = ["asp", "ssp:staleness=2", "drop:n=1", "pssp:staleness=1,p=0.5", "hybrid:step=5"]


@pytest.mark.parametrize("spec", some(SPECS, *SPECS[::8]))
def test_every_codec_both_ways_under_bsp(spec: str) -> None:
    """All workers have the same model, bit for bit, with any codec."""
    made = run(push_codec=spec, pull_codec=pulled(spec))
    assert served.clocks(made) == {0: served.ITERATIONS, 1: served.ITERATIONS}
    assert torch.equal(served.models(made), served.models(made)[0].expand(3, -1))
    if spec in ("none", "fp16", "bf16", "int8", "3lc:sparsity=1,residual=0.3"):
        assert loss(made) < 1.1 * loss(run())


@pytest.mark.parametrize("sync", some(SYNCS, "ssp:staleness=2", "hybrid:step=5"))
def test_codecs_go_with_all_sync_models(sync: str) -> None:
    """If workers have different values, each receives the change of its own."""
    made = run(sync=sync, push_codec="int8", pull_codec="int8", slow={2: 2.5})
    assert loss(made) == pytest.approx(loss(run(sync=sync, slow={2: 2.5})), rel=0.05)
    ternary = run(sync=sync, push_codec="3lc:1.0", pull_codec="3lc:1.0", slow={2: 2.5})
    assert bool(served.models(ternary).isfinite().all())


@pytest.mark.parametrize("codec", some(["3lc:1.0", "topk:ratio=0.2", "onebit"], "3lc:1.0"))
def test_a_network_that_loses_messages_changes_nothing(codec: str) -> None:
    """An unacknowledged push is sent again unchanged, and applied once.

    This compares the servers' values: a peer whose last reply is lost ends with the last change that it received.
    """
    lossy = Network(delay=0.01, loss=0.03)  # with a higher rate, a peer is considered gone at times
    options = {"push_codec": codec, "pull_codec": codec}
    made = run(network=lossy, **options)
    assert made.fired["lost"] > 0
    assert torch.equal(held(made), held(run(**options)))


def test_normalisation_and_small_tensors_may_stay_unencoded() -> None:
    """If ``small`` is larger than all tensors, nothing is encoded and nothing is lost."""
    made = run(push_codec="3lc:small=1000", pull_codec="3lc:small=1000")
    torch.testing.assert_close(served.models(made), served.joined(range(3)).expand(3, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pull", some(["3lc:1.0", "localsteps:k=3"], "3lc:1.0"))
@pytest.mark.parametrize("what", some(["crash", "pause", "late"], "crash"))
def test_new_and_returning_workers_first_receive_full_values(
    what: str, pull: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new worker starts without error feedback, a returning one with its own."""
    asked: list[tuple[int, int, bool]] = []
    frame = Changes.frame

    def seen(self: Changes, receiver: int, base: int, version: int, values: Tensor) -> SharedFrame | None:
        change = frame(self, receiver, base, version, values)
        asked.append((receiver, base, change is None))
        return change

    monkeypatch.setattr(Changes, "frame", seen)
    options = {"push_codec": "3lc:1.0", "pull_codec": pull, "servers": "0,1", "iterations": 40}
    made = served.world(3, absent=[2] if what == "late" else [], **options)
    if what == "late":
        made.start(2, served.maker(2, 3, **options), at=25.0)
    elif what == "pause":
        made.pause(2, 5.2, 40.0)
    else:
        made.crash(2, 8.2)
        made.restart(2, 20.0)
    served.ended(made, 3000.0)
    assert bool(held(made).isfinite().all())
    assert torch.equal(served.models(made), served.models(made)[0].expand(3, -1))
    bases = [base for receiver, base, _ in asked if receiver == 2]
    assert 0 < bases.count(FULL) < len(bases) / 2
    assert all(is_whole == (base == FULL) for _, base, is_whole in asked), "the server knows every base that is named"
    encoders = [memory.push_encoder for memory in made.peers[2].table_store.client._buckets.values()]
    for state in (encoder.state for encoder in encoders if encoder is not None):
        assert 10 < state.frames < 39 if what != "pause" else state.frames > 20
        assert state.kept["error"].isfinite().all() and state.kept["error"].any()
