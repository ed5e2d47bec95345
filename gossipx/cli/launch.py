"""``gossipx launch``: prints job files for a cluster's scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gossipx.cli.commands import debug
from gossipx.launch.world.launchers import MOST

if TYPE_CHECKING:
    from gossipx.tools.jobs import ClusterJob

NOT_OF_A_JOB = ("seeds", "ssh", "dry_run", "link", "model_size", "as_json", "rank", "size", "master")
"""Options of ``gossipx run`` that have no use in a job, where the scheduler defines the peers."""


@click.group("launch", short_help="Print a job for a cluster's scheduler.")
def launch() -> None:
    """Print a job for a cluster's scheduler: one independent process per peer, so that a failure ends no other peer.

    Arguments after -- are passed to 'gossipx run'.

    \b
    gossipx launch slurm --nodes 4 -- train.py > job.sh
    """


def _job(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        click.option("--name", default="gossipx", show_default=True, help="Name of the job."),
        debug,
        click.option("--gpus-per-peer", type=click.IntRange(0, 1024), default=0, help="Number of GPUs per peer."),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS OF RUN...]"),
    ):
        command = decorate(command)
    return command


@launch.command("slurm")
@click.option("--nodes", type=click.IntRange(1, MOST), default=1, show_default=True, help="Number of machines.")
@click.option(
    "--peers-per-node", type=click.IntRange(1, 1024), default=1, show_default=True, help="Number of peers per machine."
)
@click.option("--time", help="Time limit of the job in SLURM's format: 2:00:00.")
@click.option("--partition", help="Partition of the cluster.")
@_job
def slurm(time: str | None, partition: str | None, **options: Any) -> None:
    """Print a script for sbatch.

    \b
    gossipx launch slurm --nodes 4 --peers-per-node 2 --time 2:00:00 -- train.py > job.sh
    sbatch job.sh
    """
    from gossipx.tools import jobs

    print(jobs.slurm(_job_of(**options), time, partition), end="")


@launch.command("kubernetes", short_help="Print a manifest for kubectl apply.")
@click.option("--peers", "nodes", type=click.IntRange(1, MOST), required=True, help="Number of peers, one pod each.")
@click.option(
    "--image",
    required=True,
    help="Container image that contains gossipx, as the repository's Dockerfile makes, and your script.",
)
@click.option("--claim", help="PersistentVolumeClaim for the run's directory, writable by all pods.")
@_job
def kubernetes(image: str, claim: str | None, **options: Any) -> None:
    """Print a manifest for kubectl apply: an Indexed Job, and the Service by which its pods find each other.

    \b
    gossipx launch kubernetes --peers 4 --image example.org/train:1 -- train.py > job.yaml
    kubectl apply -f job.yaml
    """
    from gossipx.tools import jobs

    print(jobs.kubernetes(_job_of(peers_per_node=1, **options), image, claim), end="")


def _job_of(name: str, nodes: int, peers_per_node: int, gpus_per_peer: int, arguments: tuple[str, ...]) -> ClusterJob:
    """Return the job. Settings that 'gossipx run' would refuse are refused here."""
    from gossipx.cli.commands import run
    from gossipx.errors import UsageError
    from gossipx.launch import start
    from gossipx.settings import files
    from gossipx.tools.jobs import ClusterJob

    options = {parameter.name: parameter.opts[0] for parameter in run.params}
    given = dict(run.make_context("gossipx run", list(arguments)).params)
    file, script, resume = given.pop("config_file"), given.pop("script"), given.pop("resume")
    for other in NOT_OF_A_JOB:
        if (value := given.pop(other)) is not None and value is not False:
            raise UsageError(f"{options[other]} has no use in a job: leave it out")
    known = files.load(file) if file is not None and Path(file).is_file() else {}  # it may exist only in the image
    settings = files.resolve(known, given)
    job = ClusterJob(name, nodes, peers_per_node, gpus_per_peer, settings, arguments, bool(script))
    if resume is None:  # a resumed run has its own settings
        start.presets(settings, job.peers, script, None)
    return job
