"""Forked processes of tests behave as processes with a new interpreter do (``tests/forks``)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runs import folder

ENDS = {
    "return": ("pass", 0),
    "exit": ("sys.exit(3)", 3),
    "exit with a message": ("sys.exit('no data')", 1),
    "error": ("raise RuntimeError('no data')", 1),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "thread": ("import threading; threading.Thread(target=print, args=('from a thread',)).start()", 0),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_fork_ends_as_a_new_interpreter_does(kind: str, tmp_path: Path) -> None:
    script, code = ENDS[kind]
    (tmp_path / "end.py").write_text(
        f"import atexit, os, signal, sys\natexit.register(print, 'at exit')\nprint(*sys.argv[1:])\n{script}\n"
    )
    with folder(tmp_path, 1) as here:
        new, forked = (here.start("end.py", "a", "b", fresh=fresh).end() for fresh in (True, False))
    assert new.code == forked.code == code
    assert forked.output == new.output
    last = [ended.errors.strip().splitlines()[-1:] for ended in (new, forked)]
    assert last[0] == last[1]


def test_the_peers_of_a_run_are_forked(tmp_path: Path) -> None:
    """Else a change of the launcher could make all tests slow, and nothing would show it."""
    script = """
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with gossipx.join(model, optimizer) as peer:
    tell(peer, name=Path("/proc/self/comm").read_text().strip())
    train(peer, model, optimizer, 2)
"""
    with folder(tmp_path, 2) as here:
        here.run(here.script(script), here.path)
        assert [here.told(rank)["name"] for rank in (0, 1)] == ["peer 0", "peer 1"]
