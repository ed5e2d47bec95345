"""``gossipx export``: the averaged model of real runs, as a file that other tools can read."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
import torch
from forks.server import TEST_IMAGES
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gossipx.checkpoint import Store
from gossipx.launch.loops.train import scores
from gossipx.tasks.data import load
from gossipx.tasks.models import build_model
from runs import Ended, Folder, one_line


def export(place: Folder, *options: str | Path) -> Ended:
    return place.start("-m", "gossipx", "export", "--logdir", place.path, *options).end()


def test_the_averaged_model_is_what_the_run_says_it_is(two: Folder) -> None:
    run = two.run("--iterations", "60", "--policy", "never", "--finish", "none")  # two models that differ
    ended = export(two, "x", "--to", "model.safetensors")
    assert ended.code == 0 and ended.output == "model.safetensors is the average of 2 models, as of the end\n", (
        ended.shown
    )
    model = build_model("lenet", classes=10, channels=1, pixels=28)
    model.load_state_dict(load_file(two.path / "model.safetensors"))
    test = load("fashion-mnist", None)[1].take(torch.arange(TEST_IMAGES))
    found = scores(model, test, torch.device("cpu"))["accuracy"]
    assert found == pytest.approx(run.summary["consensus_accuracy"], abs=1e-9)
    assert found not in run.summary["test_accuracy"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, (run.model(0)[name] + run.model(1)[name]) / 2)
    with safe_open(two.path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"  # required by the loader of transformers
        assert file.metadata()["gossipx.run"] == "x" and file.metadata()["gossipx.models_averaged"] == "2"


def test_one_peers_own_model_and_what_is_refused(two: Folder) -> None:
    run = two.run("--iterations", "5", "--policy", "never", "--finish", "none")
    ended = export(two, two.path / "x", "--to", "own.safetensors", "--peer", two.names[1])
    assert ended.code == 0 and f"is peer {two.names[1]}'s model" in ended.output, ended.shown
    own = load_file(two.path / "own.safetensors")
    assert all(torch.equal(own[name], tensor) for name, tensor in run.model(1).items())
    for options, told in (
        (("x", "--to", "own.safetensors"), "the file exists: give --overwrite, or another --to"),
        (("xx", "--to", "m.safetensors"), "no such run (did you mean 'x'?)"),
        (("x", "--to", "m.pt"), "--to must name a file that ends with .safetensors"),
        (("x", "--to", "none/m.safetensors"), "--to must name a file in an existing directory"),
        (("x", "--to", "m.safetensors", "--peer", "5"), "--peer"),
    ):
        assert told in one_line(export(two, *options), 2)
    (run.directory / "peer-00" / "model.safetensors").write_bytes(b"damaged")
    assert "peer-00/model.safetensors: the model cannot be read" in one_line(
        export(two, "x", "--to", "m.safetensors"), 2
    )
    assert not (two.path / "m.safetensors").exists()
    diverged = {name: tensor * float("nan") for name, tensor in run.model(1).items()}
    save_file(diverged, run.directory / "peer-00" / "model.safetensors")
    ended = export(two, "x", "--to", "own.safetensors", "--overwrite")
    assert "the average of 1 models, 1 left out because they contain NaN" in ended.output
    assert all(torch.equal(load_file(two.path / "own.safetensors")[name], one) for name, one in run.model(1).items())


def test_a_run_that_was_stopped_gives_the_average_of_its_newest_checkpoints(two: Folder) -> None:
    process = two.start_run("--iterations", "100000", "--checkpoint-every", "20", "--policy", "tau:5")
    process.line(r"train [1-9]\d\d\d*/.*train [1-9]\d\d\d*/")
    process.signal(signal.SIGINT)
    assert process.end().code == 130
    ended = export(two, "x", "--to", "model.safetensors")
    assert ended.code == 0, ended.shown
    whole = [Store(two.path / f"x/peer-0{rank}/checkpoints").find_complete() for rank in (0, 1)]
    at = [max(whole[0] & whole[1] or one) for one in whole]
    assert min(at) > 0
    assert ended.output.endswith(f"iterations {min(at)} to {max(at)}\n" if at[0] != at[1] else f"iteration {at[0]}\n")
    files = [f"x/peer-0{rank}/checkpoints/{at[rank]:08d}/model.safetensors" for rank in (0, 1)]
    kept = [load_file(two.path / file) for file in files]
    for name, mean in load_file(two.path / "model.safetensors").items():
        torch.testing.assert_close(mean, (kept[0][name] + kept[1][name]) / 2)


@pytest.mark.slow
def test_models_from_before_a_resume_are_not_final(two: Folder) -> None:
    """Peers end at 10 and resume, and one of them is killed: its saved model is from before the resume."""
    script = """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
until, dies = int(sys.argv[2]), sys.argv[3:]
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, until)
    if dies == [str(peer.rank)]:
        while not (FOLDER / f"x/peer-0{peer.rank}/checkpoints/{until:08d}/manifest.json").exists():
            pass
        os.kill(os.getpid(), signal.SIGKILL)
"""
    begin = ("--policy", "never", "--checkpoint-every", "5", "--peer-timeout", "5", two.script(script), two.path)
    run = two.run(*begin, "10")
    before = [run.model(rank) for rank in (0, 1)]
    resume = ("-m", "gossipx", "run", "--logdir", two.path, "--resume", "x", "train.py", two.path)
    two.start(*resume, "15", "0").end()
    ended = export(two, "x", "--to", "one.safetensors")
    assert ended.code == 0 and "the average of 1 models, as of the end" in ended.output, ended.shown
    found = load_file(two.path / "one.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in run.model(1).items())
    assert not torch.equal(found["weight"], before[1]["weight"])
    ended = export(two, "x", "--to", "own.safetensors", "--peer", "0")
    assert "as of iteration 15" in ended.output, ended.shown


def test_a_run_without_any_model_says_how_models_are_saved(two: Folder) -> None:
    two.run("--iterations", "5", "--no-save-model")
    assert "have no checkpoints: a run saves models at its end, and with --checkpoint-every" in one_line(
        export(two, "x", "--to", "m.safetensors"), 2
    )


@pytest.mark.fault(76)
@pytest.mark.parametrize("checkpoints", [False, True], ids=["final", "checkpoints"])
def test_a_constant_that_is_not_a_number_is_exported(two: Folder, checkpoints: bool) -> None:
    """Such a value is in the models of all peers; a trained value that is NaN is left out also if all have it."""
    script = """
model = nn.Linear(4, 1)
model.register_buffer("unset", torch.tensor([1.0, float("nan")]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 5)
"""
    options = ("--checkpoint-every", "5", "--no-save-model") if checkpoints else ()
    run = two.run("--policy", "tau:2", "--finish", "none", *options, two.script(script), two.path)
    ended = export(two, "x", "--to", "m.safetensors")
    assert ended.code == 0 and "is the average of 2 models, as of " in ended.output, ended.shown
    found = load_file(two.path / "m.safetensors")
    assert str(found["unset"].tolist()) == "[1.0, nan]" and bool(found["weight"].isfinite().all())
    if checkpoints:
        return
    for rank in range(2):
        diverged = {**run.model(rank), "weight": torch.full((1, 4), math.nan)}
        file = run.directory / f"peer-0{rank}" / "model.safetensors"
        with safe_open(file, "pt") as before:
            metadata = before.metadata()
        save_file(diverged, file, metadata)
    told = "all models of this run contain NaN: it has diverged"
    assert told in one_line(export(two, "x", "--to", "n.safetensors"), 2)
