"""Ends of scripts that are peers without ``gossipx run``: exit codes, the script's own exit hooks and files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from runs import TEN_LINES, Folder, differences, folder

JOINS = TEN_LINES.replace(
    "(model, optimizer)",
    '(model, optimizer, peers="hosts.txt", rank=RANK, policy="never", name="x", logdir=".", peer_timeout=20)',
)


def script_of(here: Folder, rank: int, text: str) -> Path:
    """Write a script that joins as a peer of a rank, and then does as the text says."""
    return here.script("import atexit\n" + text.replace("JOIN", JOINS.replace("RANK", str(rank))), f"{rank}.py")


@pytest.mark.slow
def test_an_exit_code_of_the_finish_keeps_exit_hooks_and_files(tmp_path: Path) -> None:
    """The model is NaN, which the finish at exit finds."""
    text = """
atexit.register(lambda: print("the first hook"))
JOIN
atexit.register(lambda: print("the last hook"))
rows = (FOLDER / "rows.csv").open("w")
train(peer, model, optimizer, 10)
rows.write("iterations,10")
with torch.no_grad():
    model[0].weight.fill_(float("nan"))
"""
    with folder(tmp_path, 1) as here:
        ended = here.start(script_of(here, 0, text), here.path, fresh=True).end()
        assert ended.code == 1 and "NaN or Inf in its model" in ended.errors, ended.shown
        assert ended.output == "the last hook\nthe first hook\n"
        assert (here.path / "rows.csv").read_text() == "iterations,10"


@pytest.mark.fault(53)
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_the_finish_at_exit_has_its_exit_code(two: Folder, number: signal.Signals, code: int) -> None:
    text = """
JOIN
train(peer, model, optimizer, 20)
print("trained", flush=True)
if peer.rank == 1:
    train(peer, model, optimizer, 10**9)
"""
    waits, trains = [two.start(script_of(two, rank, text), two.path) for rank in range(2)]
    waits.line("trained")
    trains.line("trained")
    waits.signal(number)
    ended = waits.end()
    assert ended.code == code and "stopped at 20" in ended.errors, ended.shown
    trains.signal(signal.SIGTERM)
    assert trains.end().code == 0


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("model[0].weight.data.fill_(float('nan'))", 1)]
)
def test_forked_processes_of_multiprocessing_take_part_in_the_finish_unless_they_fail(
    two: Folder, end: str, code: int
) -> None:
    text = f"""
import multiprocessing

def work(RANK):
    JOIN
    train(peer, model, optimizer, 10)
    if peer.rank == 1:
        {end}

def main():
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for one in started:
        one.start()
    for one in started:
        one.join()
    print([one.exitcode for one in started])

main()
"""
    joins = JOINS.strip().replace("\n", "\n    ")
    ended = two.start(two.script(text.replace("JOIN", joins)), two.path).end()
    assert ended.output == f"[0, {code}]\n", ended.shown
    models = [two.path / "x" / f"peer-{rank:02d}" / "model.safetensors" for rank in range(2)]
    assert models[0].exists() and models[1].exists() == (code != 3), ended.shown
    if not code:
        assert max(differences(*map(load_file, models)).values()) <= 1e-6
