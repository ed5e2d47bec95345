"""``gossipx launch``: prints what a cluster's scheduler takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossipx.cli.commands import debug
from gossipx.launch.cluster.world import MOST

if TYPE_CHECKING:
    from gossipx.tools.jobs import Job

NOT_OF_A_JOB = ("dry_run", "link", "model_size", "as_json", "rank", "size", "master")
"""Options of ``gossipx run`` that a job has no use for: it says itself who its peers are, and it runs."""


@click.group("launch")
def launch() -> None:
    """Print a job for a cluster's scheduler: one independent process a peer, so that one that fails ends no other.

    What follows -- is for 'gossipx run'.

    \b
    gossipx launch slurm --nodes 4 -- --policy adaptive train.py > job.sh
    """


def _job(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        click.option("--name", default="gossipx", show_default=True, help="Of the job."),
        debug,
        click.option("--gpus-per-peer", type=click.IntRange(0, 1024), default=0, help="GPUs of each peer."),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS OF RUN...]"),
    ):
        command = decorate(command)
    return command


@launch.command("slurm")
@click.option("--nodes", type=click.IntRange(1, MOST), default=1, show_default=True, help="Machines.")
@click.option("--peers-per-node", type=click.IntRange(1, 1024), default=1, show_default=True, help="Peers on each.")
@click.option("--time", help="The job's limit, as SLURM writes it: 2:00:00.")
@click.option("--partition", help="Of the cluster.")
@_job
def slurm(time: str | None, partition: str | None, **asked: Any) -> None:
    """Print a script for sbatch.

    \b
    gossipx launch slurm --nodes 4 --peers-per-node 2 --time 2:00:00 -- --policy adaptive train.py > job.sh
    sbatch job.sh
    """
    from gossipx.tools import jobs

    print(jobs.slurm(_asked(**asked), time, partition), end="")


@launch.command("kubernetes")
@click.option("--peers", "nodes", type=click.IntRange(1, MOST), required=True, help="Peers, a pod each.")
@click.option("--image", required=True, help="Of the container, with gossipx and your script in it.")
@click.option("--claim", help="A PersistentVolumeClaim that all pods can write to, for the run's directory.")
@_job
def kubernetes(image: str, claim: str | None, **asked: Any) -> None:
    """Print a manifest for kubectl apply: an Indexed Job and the Service by which its pods find each other.

    \b
    gossipx launch kubernetes --peers 4 --image example.org/train:1 -- --policy adaptive train.py > job.yaml
    kubectl apply -f job.yaml
    """
    from gossipx.tools import jobs

    print(jobs.kubernetes(_asked(peers_per_node=1, **asked), image, claim), end="")


def _asked(name: str, nodes: int, peers_per_node: int, gpus_per_peer: int, arguments: tuple[str, ...]) -> Job:
    """The job; settings that 'gossipx run' would refuse are refused here already."""
    from gossipx.cli.commands import run
    from gossipx.config import files
    from gossipx.errors import UsageError
    from gossipx.launch import start
    from gossipx.tools.jobs import Job

    options = {parameter.name: parameter.opts[0] for parameter in run.params}
    given = dict(run.make_context("gossipx run", list(arguments)).params)
    file, script, resume = given.pop("config_file"), given.pop("script"), given.pop("resume")
    for other in NOT_OF_A_JOB:
        if (value := given.pop(other)) is not None and value is not False:
            raise UsageError(f"{options[other]} is not for a job: leave it out")
    known = files.load(file) if file is not None and Path(file).is_file() else {}  # in an image it is not here
    settings = files.resolve(known, given)
    named = frozenset(known) | {key for key, value in given.items() if value is not None}
    job = Job(name, nodes, peers_per_node, gpus_per_peer, settings, named, arguments, bool(script))
    if resume is None:  # which has settings of its own
        start.presets(settings, job.peers, script, None)
    return job
