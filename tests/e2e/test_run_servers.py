"""``gossipx run --servers`` in real processes. The scenarios and papers test the effects of single pushes and pulls."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeds import some

from gossipx.checkpoint import unpack
from gossipx.runtime.driver.shards import store_of_shard
from runs import Folder, Process, differences, one_line

BRIEF = ("--iterations", "120", "--batch-size", "8", "--eval-interval", "0", "--log-interval", "1")


OPTIONS = {
    "one": ("--servers", "0"),
    "codecs": ("--servers", "0,1", "--push-codec", "int8:block=256", "--pull-codec", "bf16", "--sync", "asp"),
    "only": ("--servers", "1", "--servers-only", "--sync", "hybrid:step=1/lr", "--no-wait-free"),
    "all": ("--mode", "server", "--sync", "pssp:staleness=1,alpha=significance"),
}


@pytest.mark.parametrize("name", some(OPTIONS, "one"))
def test_three_peers_train_by_servers(three: Folder, name: str) -> None:
    run = three.run(*BRIEF, *OPTIONS[name])
    summary = run.summary
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6 or name == "codecs"
    workers = [0, 2] if name == "only" else [0, 1, 2]
    assert all(summary["test_accuracy"][rank] > 0.6 for rank in workers)
    assert all(summary["retrievals"][rank] >= 110 for rank in workers)
    assert sum(summary["merged_by_hub"]) > 0
    assert (summary["lost"], sum(summary["failed"])) == ([], 0)


SWITCHES = """
torch.manual_seed(0)
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 10)
    while not (FOLDER / "goes-on").exists():
        train(peer, model, optimizer, peer.iteration + 1)
    if peer.rank == 1:
        peer.set_sync("ssp:staleness=2", 0, apply="tick", pulls="lazy")
        try:
            peer.set_sync("drop:n=2")
        except gossipx.errors.UsageError as error:
            tell(peer, refused=str(error))
    train(peer, model, optimizer, peer.iteration + 40)
"""


def test_the_sync_model_is_set_from_the_command_line_and_by_a_peer(two: Folder) -> None:
    """With its apply and pull modes, for all shards, for one, and for that of another peer."""
    process = two.start_run("--servers", "0,1", "--checkpoint-every", "1000", two.script(SWITCHES), two.path)
    process.line(rf"{two.names[0]} train \d+")

    def set_sync(*words: str, run: Path = two.path / "x") -> Process:
        return two.gossipx("server", "set-sync", run, *words)

    assert set_sync("ssp:staleness=2").end(code=0).output == "all shards now use ssp:staleness=2\n"
    switched = [process.line(r"shard [01] switches from bsp to ssp:staleness=2 at clock \d+") for _ in range(2)]
    assert len({line.partition(" goes")[0] for line in switched}) == 2
    two.gossipx("server", "set-sync", "x", "asp", "--shard", "1", "--logdir", two.path).end(code=0)
    process.line(r"shard 1 switches from ssp:staleness=2 to asp")
    set_sync("asp", "--apply", "each", "--pulls", "soft").end(code=0)
    for words, told in (
        (("asp", "--shard", "2"), "unknown shard: shards are 0 to 1"),
        (("sspp",), "did you mean 'ssp'"),
        (("asp", "--apply", "threshold"), "'asp' has no threshold: apply is one of push, each, tick"),
        (("asp", "--pulls", "hard"), "'hard'"),
        (("drop:n=9",), "waits for all of 2 workers: give bsp, or a smaller n"),
    ):
        assert told in one_line(set_sync(*words).end(), 2)
    (two.path / "goes-on").touch()
    process.end(code=0)
    assert "waits for all of 2 workers: give bsp, or a smaller n" in two.told(1)["refused"]
    kept = [store_of_shard(two.path / "x", index).load() for index in range(2)]
    assert [unpack(one.parts["clock"])["clock"]["made"] for one in kept if one is not None] == [
        {"model": "ssp:staleness=2", "apply": "tick", "pulls": "lazy"},
        {"model": "asp", "apply": "each", "pulls": "soft"},
    ]
    assert not list((two.path / "x" / "control").glob("*.answer"))
    assert "no such run: " in one_line(set_sync("asp", run=two.path / "y").end(), 2)
