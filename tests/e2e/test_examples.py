"""The examples: the commands of their table in a short form, in real processes, and the lines that gossipx adds."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shells
import slurm
import torch
from pages import HOUSE
from safetensors.torch import load_file

from gossipx.metrics import summary
from runs import differences

EXAMPLES = HOUSE / "examples"
MARK = "# gossipx"
LONG = 200.0  # seconds, after which a hanging example fails
SHORT = {
    "cifar_resnet.py": "--epochs 1 --limit 256 --width 4 --batch-size 8",
    "finetune_lm.py": "--steps 12 --limit 60000",
    "lightning_module.py": "--epochs 1 --batches 20",
    "accelerate_loop.py": "--steps 40 --mixed-precision bf16",
    "torchrun_ddp_groups.py": "--epochs 1 --batches 20",
    "caffe_solver.py": "--iterations 100",
    "custom_policy.py": "--epochs 1",
    "custom_sync_manager.py": "--epochs 1 --budget 5",
}
"""Arguments that make an example end in seconds."""
SCRIPTS = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "data.py")
COMMANDS = dict(
    re.findall(r"^\| \[([\w.]+)\]\(\./\1\) \| [^|]+ \| `([^`]+)` \|$", (EXAMPLES / "README.md").read_text(), re.M)
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with the examples, and a hosts file for two peers."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    (tmp_path / "hosts.txt").write_text(f"localhost:{shells.first_port()} slots=2\n")
    return tmp_path


def run(here: Path, command: str) -> str:
    """Run a command to its end, and return its output."""
    code, said = shells.run(shells.bash(command), here, LONG)
    assert code == 0, f"{command}\nended with {code}\n{said}"
    return said


def require(*names: str) -> None:
    """Skip the test if one of these packages, which are extras, is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def figures_after(word: str, said: str) -> list[float]:
    """Return the figures that follow a word in the output, in its order."""
    return [float(found) for found in re.findall(rf"{word} ([\d.]+\d)", said)]


# --- each example ---------------------------------------------------------------------------------------------


def check_lora(here: Path, found: Any, said: str) -> None:
    adapters = [load_file(here / f"runs/lora/peer-{rank:02d}/adapter/adapter_model.safetensors") for rank in range(2)]
    assert max(differences(*adapters).values()) <= 1e-6
    sizes = sum(tensor.nbytes for tensor in adapters[0].values())
    for received, pulls in zip(found.bytes_received, found.retrievals, strict=True):
        assert sizes < received / pulls < 1.2 * sizes, "the frozen model is not exchanged"
    assert min(figures_after("before: loss", said)) > max(figures_after("after: loss", said))


def check_accelerate(here: Path, found: Any, said: str) -> None:
    assert all((here / f"accelerated/peer-{rank:02d}/model.safetensors").exists() for rank in range(2))


def check_lightning(here: Path, found: Any, said: str) -> None:
    assert all((here / f"checkpoints/peer-{rank:02d}/best.ckpt").exists() for rank in range(2))


def check_policy(here: Path, found: Any, said: str) -> None:
    assert "Growing" in found.policy and all(1 <= pulls <= 5 for pulls in found.retrievals)


def check_budget(here: Path, found: Any, said: str) -> None:
    assert "Budget" in found.policy and found.retrievals == [5, 5] and min(found.skipped) > 5


CHECKS: dict[str, tuple[Callable[[Path, Any, str], None] | None, tuple[str, ...]]] = {
    "cifar_resnet.py": (None, ()),
    "finetune_lm.py": (check_lora, ("transformers", "peft")),
    "lightning_module.py": (check_lightning, ("lightning",)),
    "accelerate_loop.py": (check_accelerate, ("accelerate",)),
    "torchrun_ddp_groups.py": (None, ()),
    "caffe_solver.py": (None, ()),
    "custom_policy.py": (check_policy, ()),
    "custom_sync_manager.py": (check_budget, ()),
}
"""Further checks of a run of each example, and the extras that it needs."""
SLOW = {"torchrun_ddp_groups.py"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CHECKS])
def test_two_peers_run_an_example(here: Path, name: str) -> None:
    check, extras = CHECKS[name]
    require(*extras)
    # So short, they may be over before the first connection, or before as many pulls as they are to make.
    command = f"{COMMANDS[name]} {SHORT[name]}".replace("gossipx run", "gossipx run --blocking")
    said = run(here, command)
    found = summary.read(here / "runs" / command.split("--name ")[1].split()[0])
    assert (found.peers, found.lost, found.agreed) == (2, [], True)
    assert all(pulls or 0 for pulls in found.retrievals), said
    last = dict(re.findall(r"^\[(\S+)\] (?:accuracy|accuracy of the final model:|after: loss) ([\d.]+\d)", said, re.M))
    assert len(last) == 2 and len(set(last.values())) == 1, "both peers end with one model"
    if check is not None:
        check(here, found, said)


@pytest.mark.slow
def test_a_slurm_job_runs_the_resnet(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On one node, by options that override those of the script."""
    if (reason := slurm.lacking()) is not None:
        pytest.skip(reason)
    commands = Path(shells.environment()["PATH"].split(":")[0])
    with slurm.one_machine(tmp_path_factory.mktemp("slurm"), commands) as cluster:
        options = ["--wait", "--output", "job.txt", "--nodes", "1", "--ntasks-per-node", "2", "--cpus-per-task", "1"]
        cluster.run(["sbatch", *options, "examples/slurm.sbatch", *SHORT["cifar_resnet.py"].split()], here)
    said = (here / "job.txt").read_text()
    (directory,) = (here / "runs").glob("resnet-*")
    found = summary.read(directory)
    assert (found.peers, found.lost, found.agreed) == (2, [], True), said


@pytest.mark.slow
def test_a_notebook_starts_two_peers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require("nbclient", "ipykernel", "matplotlib")
    import nbclient
    import nbformat

    text = (EXAMPLES / "two_peers.ipynb").read_text().replace("0 1 2", "0 1")  # as many as an interval needs
    first = (here / "hosts.txt").read_text().split()[0].split(":")[1]
    for name, value in shells.environment().items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.reads(shells.with_ports(text, int(first)), as_version=4)
    nbclient.NotebookClient(notebook, timeout=LONG, resources={"metadata": {"path": str(here)}}).execute()
    names = [f"{policy}-seed{seed}" for policy in ("tau", "adaptive") for seed in (0, 1)]
    found = [json.loads((here / f"runs/{name}/summary.json").read_text()) for name in names]
    assert [one["peers"] for one in found] == [2] * 4 and all(one["agreed"] for one in found)
    assert min(one["consensus_accuracy"] for one in found) > 0.5
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("tau, 2 seeds" in output.get("text", "") for output in shown), shown
    assert any("image/png" in output.get("data", {}) for output in shown), shown


# --- the marked lines and the table -----------------------------------------------------------------------------


def without_gossipx(script: Path) -> str:
    """Return a script without the lines that are marked as gossipx's."""
    return "".join(line for line in script.read_text().splitlines(True) if not line.rstrip().endswith(MARK))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_marked_lines_are_all_that_gossipx_adds(script: Path) -> None:
    text = script.read_text()
    assert MARK in text and len(text.splitlines()) < 100
    left = without_gossipx(script)
    compile(left, script.name, "exec")
    assert "gossipx" not in left.lower()


def test_the_table_has_every_example() -> None:
    there = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md", "data.py"}
    assert set(COMMANDS) == there
    assert {path.name for path in SCRIPTS} == set(SHORT)
    for name, command in COMMANDS.items():
        assert f"examples/{name}" in command


def test_the_notebook_is_kept_without_output() -> None:
    notebook = json.loads((EXAMPLES / "two_peers.ipynb").read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


def test_the_data_of_the_examples_is_readable(tmp_path: Path) -> None:
    """A folder with CIFAR-10, the built-in images, and the text, through whose archive its reader goes itself."""
    specification = importlib.util.spec_from_file_location("data", EXAMPLES / "data.py")
    assert specification is not None and specification.loader is not None
    data = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(data)
    with pytest.raises(SystemExit, match=f"{tmp_path}: no data_batch_.* give cifar-10-batches-bin"):
        data.images(tmp_path)
    draw = np.random.default_rng(0)
    for name, records in (("data_batch_1", 120), ("data_batch_2", 120), ("test_batch", 50)):
        content = draw.integers(0, 256, (records, 3073), np.uint8)
        content[:, 0] %= 10
        content.tofile(tmp_path / f"{name}.bin")
    train, test = data.images(tmp_path)
    assert len(train) == 240 and len(test) == 50 and train[0][0].shape == (3, 32, 32)
    train, test = data.images(None)
    assert len(train) == 12_000 and len(test) == 10_000 and train[0][0].dtype == torch.float32
    assert "In the beginning God created the heaven and the earth" in data.text(None)
