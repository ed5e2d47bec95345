"""The parts of bin/demo that gossipx does not have: the same training under DDP, and the picture.

_demo.py ddp CONFIG FILE    one process of DistributedDataParallel, started by torchrun
_demo.py draw PICTURE FILE RUN...    accuracy against traffic of DDP and of the runs
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gossipx.launch.loops.train import LIVE, optimizer_of, rate_of, scores
from gossipx.metrics import curves, summary
from gossipx.settings import files
from gossipx.tasks.data import TASKS, Batches, load
from gossipx.tasks.models import build_model
from gossipx.tasks.partition import partition_from


def ddp(config: Path, target: Path) -> None:
    """Train as in the run with this configuration, but average all gradients in each step.

    The traffic is computed: a ring all-reduce of N processes sends 2 (N − 1)/N gradients in each step.
    """
    warnings.filterwarnings("ignore", message="Grad strides do not match")  # of a layer with one channel; it is fast
    run = files.resolve(files.load(config))
    settings, task = run.run, run.task
    assert task.batch_size is not None
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(settings.threads)
    everything, test = load(task.task)
    torch.manual_seed(settings.seed * 1000)
    spec = TASKS[task.task]
    model = build_model(task.model, classes=everything.classes, channels=spec.channels, pixels=spec.pixels)
    wrapped, optimizer = DistributedDataParallel(model), optimizer_of(model, task)
    own = everything.take(partition_from(task.partition).split(everything.labels.numpy(), size, settings.seed)[rank])
    batches = Batches(own, task.batch_size, settings.seed * 1000 + rank)
    live = test.take(torch.arange(LIVE))
    megabytes = 2 * (size - 1) / size * 4 * sum(parameter.numel() for parameter in model.parameters()) / 1e6
    points = []
    for step in range(1, settings.iterations + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(task, step - 1, settings.iterations)
        images, labels = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        if rank == 0 and step % settings.eval_interval == 0:
            points.append((step * megabytes, scores(model, live, torch.device("cpu"))["accuracy"]))
    if rank == 0:
        target.write_text(json.dumps(points), encoding="utf-8")
        final = scores(model, test, torch.device("cpu"))["accuracy"]
        print(f"accuracy {final:.4f} after {settings.iterations} steps, {points[-1][0]:,.0f} MB per process")
    dist.destroy_process_group()


def draw(picture: Path, of_ddp: Path, runs: list[Path]) -> None:
    """Draw the accuracy of the peers' own models, as a mean over peers, against the traffic on a logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(9, 5), layout="constrained")
    for run in runs:
        seen, found = curves.read(run).by_megabytes, summary.read(run)
        how = found.policy if found.codec == "none" else f"{found.policy}, {found.codec}"
        panel.plot(seen.x, seen.mean, marker="o", markersize=4, label=f"{run.name}: {how}")
    points = json.loads(of_ddp.read_text(encoding="utf-8"))
    panel.plot(
        *zip(*points, strict=True), marker="s", markersize=4, color="black", label="DDP, all gradients each step"
    )
    panel.set_xscale("log")
    panel.set_xlabel("MB received per peer")
    panel.set_ylabel("accuracy on 2,000 test images")
    panel.grid(alpha=0.3, which="both")
    panel.legend()
    figure.savefig(picture, dpi=120)
    print(f"{picture}: accuracy against traffic")


if __name__ == "__main__":
    if sys.argv[1] == "ddp":
        ddp(*map(Path, sys.argv[2:]))
    else:
        first, second, *rest = map(Path, sys.argv[2:])
        draw(first, second, rest)
