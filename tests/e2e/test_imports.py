"""The imports of a run's processes, in new interpreters: each import slows down every run."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import folder

LARGE = ("torch", "numba", "networkx", "tensorboard")
SCRIPT = f"""
model = nn.Linear(4, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with gossipx.join(model, optimizer) as peer:
    train(peer, model, optimizer, 10)
tell(peer, modules=[name for name in {LARGE} if name in sys.modules])
"""
PLAIN = ("--policy", "tau:5", "--topology", "ring")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PLAIN, ["torch", "tensorboard"]),
        (("--servers", "0"), ["torch", "tensorboard"]),
        (("--topology", "star", "--codec", "int8"), ["torch", "numba", "networkx", "tensorboard"]),
    ],
    ids=["gossip", "servers", "a star and a codec"],
)
def test_a_peer_imports_what_its_run_needs(tmp_path: Path, options: tuple[str, ...], expected: list[str]) -> None:
    with folder(tmp_path, 2) as here:
        here.run(*options, here.script(SCRIPT), tmp_path, fresh=True)
        assert here.told(0)["modules"] == here.told(1)["modules"] == expected


@pytest.mark.parametrize("options", [PLAIN, ("--servers", "0"), ("--hub", "1")], ids=["gossip", "servers", "hub"])
def test_the_parent_of_a_run_imports_none_of_it(tmp_path: Path, options: tuple[str, ...]) -> None:
    with folder(tmp_path, 2) as here:
        script = here.script("sys.exit(3)")
        start = ("-m", "gossipx", "run", "--peers", here.hosts, "--logdir", tmp_path, *options, script, tmp_path)
        ended = here.start("-X", "importtime", *start, fresh=True).end()
        imported = {line.rpartition("|")[2].strip() for line in ended.errors.splitlines()}
        assert ended.code == 1 and "gossipx.launch.children" in imported, ended.shown
        assert not imported & set(LARGE)
