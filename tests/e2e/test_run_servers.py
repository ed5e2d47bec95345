"""``gossipx run --servers`` in real processes. The scenarios and papers test the effects of single pushes and pulls."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gossipx.checkpoint import unpack
from gossipx.runtime.driver.shards import store_of_shard
from runs import differences, folder, one_line

BRIEF = ("--iterations", "120", "--batch-size", "8", "--eval-interval", "0", "--log-interval", "1")


@pytest.mark.parametrize(
    "options",
    [
        ("--servers", "0"),
        pytest.param(
            ("--servers", "0,1", "--push-codec", "int8:block=256", "--pull-codec", "bf16", "--sync", "asp"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--servers", "0,2", "--sync", "ssp:staleness=2", "--pulls", "soft", "--placement", "sliced"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--servers", "1", "--servers-only", "--sync", "hybrid:step=1/lr", "--no-wait-free"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--servers", "0,1", "--sync", "bsp|asp", "--bucket", "0", "--no-overlap", "--transport", "tcp"),
            marks=pytest.mark.slow,
        ),
        pytest.param(("--servers", "0,1,2", "--sync", "drop:n=2", "--apply", "tick"), marks=pytest.mark.slow),
        pytest.param(("--mode", "server", "--sync", "pssp:staleness=1,alpha=significance"), marks=pytest.mark.slow),
    ],
    ids=lambda options: " ".join(options[:4]),
)
def test_three_peers_train_by_servers(tmp_path: Path, options: tuple[str, ...]) -> None:
    with folder(tmp_path, 3) as here:
        run = here.run(*BRIEF, *options)
    summary = run.summary
    assert max(differences(run.model(0), run.model(1)).values()) <= 1e-6 or "asp" in str(options)
    workers = [0, 2] if "--servers-only" in options else [0, 1, 2]
    assert all(summary["test_accuracy"][rank] > 0.6 for rank in workers)
    assert all(summary["retrievals"][rank] >= 110 for rank in workers)
    assert sum(summary["merged_by_hub"]) > 0
    assert (summary["lost"], sum(summary["failed"])) == ([], 0)


def test_the_sync_model_is_set_from_the_command_line(tmp_path: Path) -> None:
    with folder(tmp_path, 2) as here:
        process = here.start_run(*BRIEF, "--servers", "0,1", "--iterations", "100000")
        process.line(rf"{here.names[0]} train \d+/")
        told = here.start("-m", "gossipx", "server", "set-sync", here.path / "x", "ssp:staleness=2").end()
        assert (told.code, told.output) == (0, "all shards now use ssp:staleness=2\n"), told.shown
        first = process.line(r"shard [01] switches from bsp to ssp:staleness=2 at clock \d+")
        second = process.line(r"shard [01] switches from bsp to ssp:staleness=2 at clock \d+")
        assert first.partition(" goes")[0] != second.partition(" goes")[0]
        one = here.start("-m", "gossipx", "server", "set-sync", "x", "asp", "--shard", "1", "--logdir", here.path).end()
        assert one.code == 0, one.shown
        process.line(r"shard 1 switches from ssp:staleness=2 to asp")
        wrong = here.start("-m", "gossipx", "server", "set-sync", here.path / "x", "asp", "--shard", "2").end()
        assert one_line(wrong, 2) == "unknown shard: shards are 0 to 1"
        wrong = here.start("-m", "gossipx", "server", "set-sync", here.path / "x", "sspp").end()
        assert "did you mean 'ssp'" in one_line(wrong, 2)
        process.signal(signal.SIGINT)
        assert process.end().code == 130
        assert not list((here.path / "x" / "control").glob("*.answer"))
        gone = here.start("-m", "gossipx", "server", "set-sync", here.path / "y", "asp").end()
        assert "no such run: " in one_line(gone, 2)


SWITCHES = """
from gossipx.errors import UsageError

torch.manual_seed(0)
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 10)
    while not (FOLDER / "goes-on").exists():
        signal.sigtimedwait([], 0.01)
    if peer.rank == 1:
        peer.set_sync("ssp:staleness=2", 0, apply="tick", pulls="lazy")
        refused = []
        for sync, apply in (("sspp", ""), ("asp", "threshold"), ("drop:n=2", "")):
            try:
                peer.set_sync(sync, apply=apply)
            except UsageError as error:
                refused.append(str(error))
        tell(peer, refused=refused)
    train(peer, model, optimizer, 40)
"""


@pytest.mark.slow
def test_apply_and_pull_modes_are_set_with_the_sync_model(tmp_path: Path) -> None:
    """From the command line for all shards, then by ``peer.set_sync`` for another peer's shard."""
    with folder(tmp_path, 2) as here:
        script = here.script(SWITCHES)
        process = here.start_run("--servers", "0,1", "--checkpoint-every", "1000", script, tmp_path)
        process.line(rf"{here.names[0]} train ")
        set_sync = ("-m", "gossipx", "server", "set-sync", here.path / "x")
        told = here.start(*set_sync, "asp", "--apply", "each", "--pulls", "soft").end()
        assert told.code == 0, told.shown
        wrong = here.start(*set_sync, "asp", "--apply", "threshold").end()
        assert "'asp' has no threshold: apply is one of push, each, tick" in one_line(wrong, 2)
        wrong = here.start(*set_sync, "asp", "--pulls", "hard").end()
        assert "'hard'" in one_line(wrong, 2)
        wrong = here.start(*set_sync, "drop:n=9").end()
        assert "waits for all of 2 workers: give bsp, or a smaller n" in one_line(wrong, 2)
        (tmp_path / "goes-on").touch()
        ended = process.end()
        assert ended.code == 0, ended.shown
        refused = here.told(1)["refused"]
    assert "did you mean 'ssp'" in refused[0] and "'asp' has no threshold" in refused[1]
    assert "waits for all of 2 workers: give bsp, or a smaller n" in refused[2]
    kept = [store_of_shard(tmp_path / "x", index).load() for index in range(2)]
    made = [unpack(one.parts["clock"])["clock"]["made"] for one in kept if one is not None]
    assert made == [
        {"model": "ssp:staleness=2", "apply": "tick", "pulls": "lazy"},
        {"model": "asp", "apply": "each", "pulls": "soft"},
    ]
