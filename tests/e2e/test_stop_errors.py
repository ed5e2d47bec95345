"""Errors of scripts that were asked to stop, and scripts that exit by themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import places
from resuming import check_stopped, resume, store
from served_loops import batch, loss_of, net, sgd

import gossipx
from gossipx.integrations import ddp
from gossipx.metrics import summary
from gossipx.runtime.checkpoints import store_of
from runs import TEN_LINES, Folder, folder

ASKED = """
import atexit

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True) or END)
"""
"""The start of a script; END is what its own handler does."""


def stop(two: Folder, script: str, *options: str, by: int = signal.SIGTERM, code: int = 0) -> str:
    """Stop a script when both peers have printed "so far", after 20 iterations; return what they have printed.

    Check that the peers left in order, without a traceback.
    """
    run = two.start_run(*options, "--peer-timeout", "60", two.script(script), two.path)
    for _ in two.names:
        run.line("so far")
    run.signal(by)
    ended = run.end(code=code)
    assert ended.errors == "", ended.shown
    assert check_stopped(two, ended.output) == [20, 20]
    return ended.output


@pytest.mark.fault(53)
@pytest.mark.parametrize("block", ["with peer:", pytest.param("if True:", marks=pytest.mark.slow)])
def test_an_error_after_the_signal_does_not_lose_the_checkpoint(two: Folder, block: str) -> None:
    """A data loader raises one, for example, when the signal has killed its workers, too."""
    script = f"""
{block}
    train(peer, model, optimizer, 20)
    print("so far")
    while not asked:
        os.sched_yield()
    raise RuntimeError("a worker is gone\\nkilled")
"""
    script = ASKED.replace("END", "None") + TEN_LINES + script
    output = stop(two, script, "--policy", "never", by=signal.SIGINT, code=130)
    line = "the script has failed since it was asked to stop: RuntimeError: a worker is gone\n"
    assert output.count(line) == 2, output


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    "mode",
    [
        ("--policy", "tau:5", "--delta", "sampled"),
        pytest.param(("--servers", "0", "--sync", "asp"), marks=pytest.mark.slow),
        pytest.param(("--policy", "tau:5"), marks=pytest.mark.slow),
    ],
    ids=["sampled delta", "servers", "gossip"],
)
def test_an_error_in_the_middle_of_an_iteration(two: Folder, mode: tuple[str, ...]) -> None:
    """Where no boundary is kept, the checkpoint is of the model as it is then."""
    script = """
with peer:
    train(peer, model, optimizer, 20)
    print("so far")
    while not asked:
        os.sched_yield()
    optimizer.zero_grad()
    model(batch(peer)).sum().backward()
    raise RuntimeError("a worker is gone")
"""
    stop(two, ASKED.replace("END", "None") + TEN_LINES + script, *mode)
    again = resume(two)
    again.line("so far")
    again.signal(signal.SIGTERM)
    again.end(code=0)


@pytest.mark.fault(53)
@pytest.mark.parametrize("block", ["with peer:", pytest.param("if True:", marks=pytest.mark.slow)])
def test_a_handler_of_the_script_that_exits_does_not_lose_the_checkpoint(two: Folder, block: str) -> None:
    script = f"""
{block}
    train(peer, model, optimizer, 20)
    print("so far")
    while True:
        os.sched_yield()
"""
    stop(two, ASKED.replace("END", "sys.exit(0)") + TEN_LINES + script, "--policy", "never")


@pytest.mark.fault(53)
def test_a_script_that_exits_by_itself_is_counted(two: Folder) -> None:
    """It asks for no checkpoint."""
    script = two.script(TEN_LINES + "with peer:\n    train(peer, model, optimizer, 20)\n    sys.exit(0)\n")
    ended = two.run("--policy", "never", script, two.path).ended
    assert ended.errors == "" and "stopped at 20; there is no checkpoint to continue from" in ended.output, ended.shown
    figures = summary.read(two.path / "x")
    assert figures.iterations == 20 and figures.stopped == two.names and figures.lost == []


def loop(kind: str, hosts: Path) -> tuple[Callable[[], object], Any]:
    """Join a run of one peer; return an iteration of its training."""
    model = net()
    settings = {"peers": hosts, "rank": 0, "logdir": str(hosts.parent), "peer_timeout": 20.0}
    if kind == "solver":
        given = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 1000 type: "SGD"'
        (hosts.parent / "solver.prototxt").write_text(given)
        batches = ((batch(step), None) for step in range(1000))
        solver = gossipx.get_solver(
            hosts.parent / "solver.prototxt", net=model, loss=lambda made, _: (made - 1).square().mean(), train=batches
        )
        return lambda: solver.step(1), gossipx.attach(solver, **settings).peer
    optimizer = sgd(model)
    served = {"mode": "server", "servers": "0"} if kind == "servers" else {}
    peer: Any
    if kind == "group":
        peer = ddp.join(model, optimizer, **settings)
    else:
        peer = gossipx.join(model, None if kind == "steps" else optimizer, **settings, **served)

    def iteration() -> None:
        optimizer.zero_grad()
        loss_of(model, batch(peer.iteration)).backward()
        optimizer.step()
        if kind == "steps":
            peer.step()

    return iteration, peer


@pytest.mark.fault(53)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["optimizer", "steps", "servers", "solver", "group"])
def test_a_script_that_catches_every_error_is_ended_by_each_further_step(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    """A bare ``except`` within its loop, which would train on alone to the end."""
    (tmp_path / "hosts.txt").write_text(f"{places(1)[0]}\n")
    iteration, peer = loop(kind, tmp_path / "hosts.txt")
    try:
        for _ in range(3):
            iteration()
        signal.raise_signal(number)
        ends: list[type[BaseException]] = []
        for _ in range(6):
            try:
                iteration()
            except BaseException as end:
                ends.append(type(end))
    finally:
        peer.close()
    assert ends == [SystemExit if number == signal.SIGTERM else KeyboardInterrupt] * 6
    kept = (None,) if kind == "group" else (3, 4)  # a group's state is saved by its script
    assert store_of(tmp_path / "joined", 0).find() in kept, "of the iteration in which it was asked to stop"


WORKERS = """
import multiprocessing

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index >= 20:
            signal.pause()
        return torch.ones(4)


with gossipx.join(model, optimizer, peers="hosts.txt", rank=0, name="x", logdir=".") as peer:
    for inputs in torch.utils.data.DataLoader(Data(), 1, num_workers=1):
        model(inputs).sum().backward()
        optimizer.step()
        if peer.iteration == 20:
            print("so far", *(worker.pid for worker in multiprocessing.active_children()), flush=True)
"""


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow)]
)
def test_a_signal_that_reaches_the_workers_of_a_data_loader(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """As one does that is sent to the process group."""
    with folder(tmp_path, 1) as here:
        peer = here.start(here.script(WORKERS), here.path)
        *_, worker = peer.line("so far").split()
        peer.signal(number)
        os.kill(int(worker), number)
        ended = peer.end(code=code)
        assert store(here, 0).find() == 20
        told = f"{here.names[0]} stopped at 20; continue with GOSSIPX_RESUME=1 in the environment\n"
        assert told in ended.errors, ended.shown
        assert "has failed since it was asked to stop: RuntimeError: DataLoader worker" in ended.errors, ended.shown
