"""Peers started by torchrun, a SLURM cluster of one machine, and mpirun: the real programs, if they are installed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import slurm
from emulated import EmulatedNetwork, Host
from emulated import lacking as no_network

from gossipx.checkpoint import Store
from gossipx.metrics import summary
from runs import LONG, PRELUDE

BRIEF = ("--policy", "tau:5", "--blocking", "--peer-timeout", "60")
ROOT = Path(__file__).parents[2]

SCRIPT = (
    PRELUDE
    + """
torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
peer = gossipx.join(model, optimizer, policy="tau:5", peer_timeout=60)
with peer:
    train(peer, model, optimizer, 30)
tell(peer, rank=peer.rank, size=peer.size, sum=float(sum(p.detach().double().sum() for p in model.parameters())))
"""
)
"""A user's script, which does not depend on the launcher."""


@pytest.fixture(scope="module")
def bin_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with gossipx and python as commands."""
    folder = tmp_path_factory.mktemp("bin")
    for name, command in (("gossipx", "-m gossipx "), ("python", "")):
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command}"$@"\n')
        file.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def shell(bin_directory: Path) -> slurm.Shell:
    """Runs commands outside of any launcher."""
    return slurm.Shell(slurm.environment_with(bin_directory))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, bin_directory: Path) -> Iterator[slurm.Shell]:
    """A SLURM cluster of this machine."""
    if (reason := slurm.lacking()) is not None:
        pytest.skip(reason)
    with slurm.one_machine(tmp_path_factory.mktemp("slurm"), bin_directory) as made:
        yield made


def torchrun(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]


def mpirun(*arguments: str | Path) -> list[str | Path]:
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun (Debian's openmpi-bin) not found")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-np", "2", *arguments]


AGAIN = (
    PRELUDE
    + """
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
peer = gossipx.join(model, optimizer, policy="tau:5", peer_timeout=60)
attempt, began = os.environ.get("COUNTER", "0"), peer.iteration
(FOLDER / f"{peer.rank}-in-{attempt}").write_text(str(began))
with peer:
    BEGIN
    while not all_have(peer, "trained", peer.iteration >= 20, range(2)):
        train(peer, model, optimizer, peer.iteration + 1)
    train(peer, model, optimizer, 10**9 if attempt == "0" else began + 20)
"""
)
"""A script that the launcher ends in its first attempt, while it trains."""


def check_resumed(folder: Path, launcher: str, output: str, under_run: bool) -> None:
    """Check that the second attempt of a job has resumed what the first one began."""
    began = {file.name: int(file.read_text()) for file in folder.glob("?-in-?")}
    assert sorted(began) == ["0-in-0", "0-in-1", "1-in-0", "1-in-1"], output
    assert began["0-in-0"] == began["1-in-0"] == 0 and min(began["0-in-1"], began["1-in-1"]) >= 20, output
    how = "run tau is of an earlier one; this one resumes it" if under_run else "it resumes from the checkpoints"
    assert output.count(f"attempt 1 of this {launcher} job: {how}") == 1, output
    if under_run:
        assert [run.name for run in (folder / "runs").iterdir()] == ["tau"]
        assert summary.read(folder / "runs" / "tau").lost == []


def written(folder: Path) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return script


# --- torchrun -----------------------------------------------------------------------------------------


def test_torchrun_starts_a_script(tmp_path: Path, shell: slurm.Shell) -> None:
    ended = shell.run(torchrun(written(tmp_path), tmp_path), tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(one["rank"], one["size"]) for one in told] == [(0, 2), (1, 2)]
    assert told[0]["sum"] == pytest.approx(told[1]["sum"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.fault(74)
@pytest.mark.parametrize("kind", [[], ["--no-python", "gossipx", "run", *BRIEF]], ids=["script", "gossipx run"])
def test_torchrun_ends_all_when_one_fails_and_the_next_attempt_resumes(
    tmp_path: Path, shell: slurm.Shell, kind: list[str]
) -> None:
    """The peer that failed, without a checkpoint, gets the model of the other. The second attempt finds its peers
    without using keys that the first one left in the store."""
    script = tmp_path / "train.py"
    dies = "if attempt == '0' and peer.rank == 1:\n        train(peer, model, optimizer, 20)\n        sys.exit(7)"
    script.write_text(AGAIN.replace("BEGIN", dies).replace("COUNTER", "TORCHELASTIC_RESTART_COUNT"))
    ended = shell.run(torchrun("--max-restarts", "1", *kind, script, tmp_path), tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    check_resumed(tmp_path, "torchrun", ended.stdout + ended.stderr, bool(kind))


# --- SLURM --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_printed_job_keeps_the_others_when_one_dies(tmp_path: Path, cluster: slurm.Shell) -> None:
    """On a cluster that by default ends all tasks when one fails."""
    script = tmp_path / "train.py"
    dies = "for process in (os.getppid(), os.getpid()):\n            os.kill(process, signal.SIGKILL)"
    first = f"    if peer.rank == 0:\n        train(peer, model, optimizer, 10)\n        {dies}\n"
    script.write_text(SCRIPT.replace("with peer:\n", f"with peer:\n{first}"))
    arguments = ["--name", "x", "--peer-timeout", "5", script, tmp_path]
    printed = cluster.run(["gossipx", "launch", "slurm", "--peers-per-node", "2", "--", *arguments], tmp_path)
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "job.sh").write_text(printed.stdout)
    cluster.run(["sbatch", "--wait", "--output", tmp_path / "job.txt", tmp_path / "job.sh"], tmp_path)
    told = (tmp_path / "job.txt").read_text()
    found = summary.read(tmp_path / "runs" / "x")
    assert len(found.lost) == 1 and found.lost[0].endswith("-0"), told
    assert json.loads((tmp_path / "1.json").read_text())["size"] == 2, told
    assert not (tmp_path / "0.json").exists()


@pytest.mark.fault(74)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gossipx run", "script"])
def test_a_job_that_slurm_starts_again_resumes(tmp_path: Path, cluster: slurm.Shell, kind: str) -> None:
    """As after preemption, or the failure of a node."""
    script = tmp_path / "train.py"
    script.write_text(AGAIN.replace("BEGIN", "pass").replace("COUNTER", "SLURM_RESTART_COUNT"))
    job = "#!/bin/bash\n#SBATCH --ntasks=2 --requeue --open-mode=append\nexec srun python train.py .\n"
    if kind == "gossipx run":
        arguments = ["--policy", "tau:5", "--peer-timeout", "60", script, tmp_path]
        printed = cluster.run(["gossipx", "launch", "slurm", "--peers-per-node", "2", "--", *arguments], tmp_path)
        job = printed.stdout
    (tmp_path / "job.sh").write_text(job)
    submitted = cluster.run(["sbatch", "--output", tmp_path / "job.txt", tmp_path / "job.sh"], tmp_path)
    number = submitted.stdout.split()[-1]

    def told() -> str:
        file = tmp_path / "job.txt"
        return file.read_text() if file.exists() else ""

    def until(there: Callable[[], bool]) -> None:
        by = time.monotonic() + LONG
        while not there():
            assert time.monotonic() < by, told()
            time.sleep(0.2)

    until(lambda: all((tmp_path / f"{rank}-trained").exists() for rank in range(2)))
    assert cluster.run(["scontrol", "requeue", number], tmp_path).returncode == 0
    until(lambda: not cluster.run(["squeue", "-h", "-j", number], tmp_path).stdout.strip())
    check_resumed(tmp_path, "srun", told(), kind == "gossipx run")


# --- several machines ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_machines_that_share_nothing_but_a_network(tmp_path: Path) -> None:
    """Each machine publishes the address by which it reached rank 0, and has its own directory of the run. Binding to
    all addresses requires a secret."""
    if (reason := no_network()) is not None:
        pytest.skip(reason)
    secret = {"GOSSIPX_SECRET": secrets.token_hex(16)}
    with EmulatedNetwork(peers=2, rate="1gbit") as net:
        started = [start(host, rank, net, tmp_path, secret) for rank, host in enumerate(net.hosts)]
        told = [process.communicate(timeout=LONG)[0] for process in started]
        assert [process.returncode for process in started] == [0, 0], told
        for rank in range(2):
            directory = tmp_path / f"host-{rank}" / "x"
            assert summary.read(directory).lost == []
            lines = (directory / "hosts.txt").read_text().splitlines()
            assert [line.partition(":")[0] for line in lines[:2]] == [host.address for host in net.hosts]


def start(host: Host, rank: int, net: EmulatedNetwork, folder: Path, secret: dict[str, str]) -> subprocess.Popen[Any]:
    logdir = folder / f"host-{rank}"
    logdir.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOSSIPX_")}
    place = {"GOSSIPX_RANK": str(rank), "GOSSIPX_SIZE": "2", "GOSSIPX_MASTER": net.hosts[0].address}
    options = ["--name", "x", "--logdir", logdir, "--bind", "0.0.0.0", *BRIEF, written(logdir), logdir]
    return host.popen(
        [sys.executable, "-m", "gossipx", "run", *options],
        env={**kept, **secret, **place, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


# --- stopping -----------------------------------------------------------------------------------------

ENDLESS = (
    SCRIPT.partition("with peer:")[0].replace("peer_timeout=60", "peer_timeout=60, name='x'")
    + """
with peer:
    train(peer, model, optimizer, peer.iteration + 20)
    (FOLDER / f"{peer.rank}-trains").touch()
    train(peer, model, optimizer, 10**9)
"""
)


def stopped(command: Sequence[str | Path], folder: Path, shell: slurm.Shell) -> str:
    """Start a launcher, terminate it when two peers train, and return its output."""
    output = folder / "output"
    environment = dict(shell.environment)
    with output.open("w") as file:
        started = subprocess.Popen([*map(str, command)], cwd=folder, env=environment, stdout=file, stderr=file)
        try:
            by = time.monotonic() + LONG
            while not all((folder / f"{rank}-trains").exists() for rank in range(2)):
                assert started.poll() is None and time.monotonic() < by, output.read_text()
                os.sched_yield()
            if command[0] == "srun":  # itself it would kill its tasks at once
                subprocess.run(["scancel", "--name", "stops"], env=environment, check=True)
            else:
                started.send_signal(signal.SIGTERM)
            started.wait(LONG)
        finally:
            started.kill()
            started.wait()
    return output.read_text()


def launched(launcher: str, program: Sequence[str | Path]) -> list[str | Path]:
    if launcher == "torchrun":
        return torchrun(*(["--no-python"] if program[0] == "gossipx" else []), *program[program[0] == "python" :])
    if launcher == "mpirun":
        return mpirun("--mca", "odls_base_sigkill_timeout", "12", *program)
    return ["srun", "--job-name", "stops", "--ntasks", "2", "--kill-on-bad-exit=0", "--wait=0", *program]


@pytest.mark.fault(53)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "kind"),
    [("torchrun", "script"), ("mpirun", "gossipx run"), ("srun", "script"), ("srun", "gossipx run")],
)
def test_a_launcher_that_is_terminated_stops_its_peers_in_order(
    tmp_path: Path, shell: slurm.Shell, launcher: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Both peers have a checkpoint and a model."""
    script = tmp_path / "train.py"
    script.write_text(ENDLESS)
    run_it = ["gossipx", "run", "--name", "x", *BRIEF] if kind == "gossipx run" else ["python"]
    where = request.getfixturevalue("cluster") if launcher == "srun" else shell
    output = stopped(launched(launcher, [*run_it, script, tmp_path]), tmp_path, where)
    directory = tmp_path / "runs" / "x"
    for rank in range(2):
        own = directory / f"peer-{rank:02d}"
        assert (Store(own / "checkpoints").find() or 0) >= 20, output
        assert (own / "model.safetensors").exists(), output
    if kind == "gossipx run":
        found = summary.read(directory)
        assert len(found.stopped) == 2 and found.lost == [] and None not in found.retrievals, output
        assert output.count("continue with: gossipx run --resume x") == 1, output
