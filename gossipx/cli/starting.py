"""``gossipx run``, ``gossipx simulate`` and ``gossipx launch``: training here, in virtual time, or as a cluster's job.

The options of ``run`` are generated from the declarations in :mod:`gossipx.settings.sections`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from gossipx.cli.main_group import main
from gossipx.cli.output import print_tables
from gossipx.cli.parsing import (
    Option,
    RunCommand,
    complete_file,
    complete_run,
    debug,
    help_all,
    options,
    script_argument,
)
from gossipx.errors import UsageError
from gossipx.launch.world.launchers import MOST, LaunchWorld, find
from gossipx.settings import files
from gossipx.settings.sections import KEYS, RunConfig

if TYPE_CHECKING:
    from gossipx.launch.run.ssh import Command as OverSsh
    from gossipx.tools.dry_run import DryRun
    from gossipx.tools.jobs import ClusterJob


@main.command(
    "run",
    cls=RunCommand,
    short_help="Train with all peers of this machine.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@click.option(
    "--config",
    "config_file",
    cls=Option,
    common="Run",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file with settings; options on the command line override it.",
)
@click.option(
    "--resume",
    cls=Option,
    common="Run",
    metavar="RUN",
    help="Resume a run, given by name or directory, from its checkpoints.",
    shell_complete=complete_run,
)
@click.option(
    "--seeds",
    cls=Option,
    common="Run",
    metavar="SEEDS",
    help="One run per seed, one after the other, such as 0-4 or 0,2,5; their names end with the seed.",
)
@click.option("--ssh", is_flag=True, help="Start the peers of the other hosts, too, with your ssh.")
@click.option("--dry-run", is_flag=True, help="Show the peers and the expected traffic; start nothing.")
@click.option(
    "--link", metavar="RATE", help="With --dry-run: bandwidth between machines, such as 100mbit.  [default: 1gbit]"
)
@click.option("--model-size", metavar="BYTES", help="With --dry-run: size of a SCRIPT's model, such as 45MB.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print JSON.")
@options(*KEYS)
@debug
@help_all
@script_argument
def run_command(
    config_file: Path | None,
    resume: str | None,
    seeds: str | None,
    ssh: bool,
    dry_run: bool,
    link: str | None,
    model_size: str | None,
    as_json: bool,
    script: tuple[str, ...],
    **settings: Any,
) -> None:
    """Train the built-in task, or your own SCRIPT, with all peers of this machine.

    \b
    # the built-in task, four peers on this machine
    echo 'localhost slots=4' > hosts.txt
    gossipx run --peers hosts.txt
    # your own script, with its arguments
    gossipx run --peers hosts.txt --policy tau:10 train.py --epochs 3
    # several machines: the same command on each, or --ssh on one of them
    gossipx run --peers hosts.txt --bind 0.0.0.0 --secret-file secret train.py
    # five runs, which gossipx compare shows as one with 95 % intervals
    gossipx run --peers hosts.txt --seeds 0-4
    # resume a run from its checkpoints
    gossipx run --resume tau
    # peers and expected traffic; starts nothing
    gossipx run --peers hosts.txt --dry-run --link 100mbit
    # started by torchrun or SLURM: each process is one peer
    torchrun --nproc-per-node 4 --no-python gossipx run
    srun gossipx run
    """
    from gossipx.launch.run.processes import launch
    from gossipx.launch.run.ssh import Command
    from gossipx.launch.world.source import source_of

    _check_together(click.get_current_context().params)
    over_ssh = Command(settings, config_file, resume, script) if ssh else None
    if resume is not None:
        if config_file:
            raise UsageError("--config is for a new run, but --resume uses the settings of the run: leave one out")
        sys.exit(_resume(resume, settings, list(script), over_ssh))
    given = files.load(config_file) if config_file else {}
    resolved = files.resolve(given, settings)
    hosts = None if resolved.run.peers is None else Path(resolved.run.peers)
    source = source_of(hosts, script, os.environ)
    if dry_run:
        world = find(os.environ) if source.launcher else None
        _dry_run(resolved, source.hosts, list(script), world, link, model_size, as_json)
    elif seeds is not None:
        from gossipx.launch.run.several_seeds import launch_each, seeds_from

        sys.exit(launch_each(source, resolved, seeds_from(seeds), list(script)))
    else:
        sys.exit(launch(source, resolved, list(script), over_ssh=over_ssh).code)


def _resume(run: str, settings: Mapping[str, Any], script: list[str], over_ssh: OverSsh | None) -> int:
    from gossipx.launch.directory.resume import peers_before, resumed_settings
    from gossipx.launch.run.processes import launch
    from gossipx.launch.world.source import source_of

    world = find(os.environ)
    started = None if world is None else (world.size, world.source)
    resolved, hosts, script = resumed_settings(run, settings, script, started)
    source = source_of(hosts, script, os.environ)
    return launch(source, resolved, script, resumed_size=peers_before(resolved), over_ssh=over_ssh).code


NOT_TOGETHER = {
    "ssh": (("dry_run", "seeds"), "starts one run, and {} does not: leave one out"),
    "dry_run": (("resume",), "shows a new run: leave {} out"),
    "seeds": (("resume", "dry_run", "seed"), "starts several new runs, and {} is for one: leave one out"),
}
"""Options of ``gossipx run`` that exclude others, with the reason."""


def _check_together(values: Mapping[str, Any]) -> None:
    """Refuse options of ``gossipx run`` that exclude or require each other."""
    given = {name for name, value in values.items() if value is not None and value is not False}
    for name in ("link", "model_size", "as_json"):
        if name in given and "dry_run" not in given:
            raise UsageError(f"{_option(name)} requires --dry-run: add that, or leave it out")
    for name, (others, reason) in NOT_TOGETHER.items():
        for other in others:
            if {name, other} <= given:
                raise UsageError(f"{_option(name)} {reason.format(_option(other))}")


def _option(name: str) -> str:
    """Return how a parameter of ``gossipx run`` is written."""
    return next(one.opts[0] for one in run_command.params if one.name == name)


def _dry_run(
    settings: RunConfig,
    hosts: Path | None,
    script: list[str],
    world: LaunchWorld | None,
    link: str | None,
    model_size: str | None,
    as_json: bool,
) -> None:
    from gossipx.tools.dry_run import dry_run as examine

    if hosts is None:
        raise UsageError("--dry-run requires a hosts file: give --peers hosts.txt")
    with Console(stderr=True).status("with many peers this may take minutes"):  # shown on a terminal only
        found = examine(settings, hosts, script, link, model_size, world)
    show_dry_run(found, as_json)


def show_dry_run(found: DryRun, as_json: bool) -> None:
    """Print the peers and the expected traffic of a run."""
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    if found.notice is not None:
        print(found.notice, file=sys.stderr)
    print_tables(_peers_table(found), _traffic_table(found))
    for line in _traffic_notes(found):
        print(line)


def _peers_table(found: DryRun) -> Table:
    here = sum(peer.here for peer in found.peers)
    title = f"{found.name}: {len(found.peers)} peers, {here} of them here. Nothing was started or written"
    table = Table(title=title, title_justify="left")
    for heading in ("rank", "name", "address", "device", "part", "where"):
        table.add_column(heading, justify="right" if heading == "rank" else "left", overflow="fold")
    for peer in found.peers:
        where = "here" if peer.here else "elsewhere"
        table.add_row(str(peer.rank), peer.name, peer.address, peer.device, peer.part, where)
    return table


def _traffic_table(found: DryRun) -> Table:
    unit = "" if found.model.is_known else ", per MB of model"
    table = Table(title=f"Traffic of {found.iterations:,} iterations{unit}", title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("times per peer", "MB each way", "busiest peer's", f"s at {found.link}"):
        table.add_column(heading, justify="right")
    table.add_column("source")
    for one in found.traffic:
        table.add_row(
            one.policy,
            f"{one.exchanges:,.4g}",
            f"{one.received_bytes * 1e-6:,.4g}",
            f"{one.busiest_bytes * 1e-6:,.4g}",
            f"{one.link_seconds:,.3g}",
            one.source,
        )
    return table


def _traffic_notes(found: DryRun) -> list[str]:
    model = found.model
    size = f"{model.exchanged_bytes / 1e6:.4g} MB"
    if not model.is_known:
        size = "unknown size: figures are per MB; give the size by --model-size 45MB"
    notes = [f"model {model.name}: {size}, codec {model.codec}"]
    if model.encoded_bytes != model.exchanged_bytes:
        notes[0] += f": {model.encoded_bytes / 1e6:.4g} MB for normally distributed values"
    if found.fragments > 1:
        part = model.encoded_bytes / found.fragments
        notes.append(f"an exchange moves one of {found.fragments} fragments: {part / 1e6:.4g} MB")
    notes.append(f"one exchange alone takes {found.exchange_seconds:.3g} s, at {found.exchange_rate}")
    if not found.between_machines:
        notes.append("all peers are on one machine: seconds assume a separate link for each")
    uncounted = []
    if found.start_bytes:
        uncounted.append(f"each peer but the first receives {found.start_bytes / 1e6:.4g} MB at the start")
    if found.finish_bytes:
        uncounted.append(f"each peer receives {found.finish_bytes / 1e6:.4g} MB on average in the finish")
    if uncounted:
        notes.append(f"not counted above: {', '.join(uncounted)}")
    if found.policy not in [one.policy for one in found.traffic]:
        notes.append(f"no estimate for {found.policy}: it measures the drift of models, which only training shows")
    if not found.is_length_known:
        notes.append(
            f"a script sets its own number of iterations: these figures assume --iterations {found.iterations}"
        )
    return notes


@main.command("simulate", short_help="Run a scenario in virtual time.")
@click.argument("scenario", required=False, metavar="SCENARIO", shell_complete=complete_file)
@click.option("--list", "lists", is_flag=True, help="List the scenarios that gossipx has.")
@options(
    *("name", "logdir", "overwrite", "seed", "iterations"),
    help={
        "name": "Name of the run and of its directory in --logdir. Default: the scenario's, and a number if taken.",
        "seed": "Seed of all random numbers. Default: the scenario's, or 0.",
        "iterations": "Iterations per peer. Default: the scenario's, or 3000.",
    },
)
@debug
def simulate_command(scenario: str | None, lists: bool, **settings: Any) -> None:
    """Run the peers of a SCENARIO in virtual time: a TOML file, or the name of one that gossipx has.

    The peers decide as in a real run, over a modelled network. The result is the directory of a run.

    \b
    gossipx simulate --list
    gossipx simulate stragglers
    gossipx simulate my-cluster.toml --seed 1 --name second
    gossipx compare runs/stragglers runs/second
    """
    from gossipx.launch.simulation import scenarios

    if lists:
        table = Table("scenario", "what it shows")
        for name, shows in scenarios.described().items():
            table.add_row(name, shows)
        print_tables(table)
        return
    if scenario is None:
        raise UsageError("no scenario given: name a TOML file, or one of gossipx simulate --list")
    from gossipx.launch.simulation.run import simulate as run
    from gossipx.settings.scenario import load

    path = scenarios.find(scenario)
    sys.exit(run(load(path, settings), Path(path).stem))


NOT_OF_A_JOB = ("seeds", "ssh", "dry_run", "link", "model_size", "as_json")
"""Options of ``gossipx run`` that have no use in a job, where the scheduler defines the peers."""


@main.group("launch", short_help="Print a job for a cluster's scheduler.")
def launch_group() -> None:
    """Print a job for a cluster's scheduler: one independent process per peer, so that a failure ends no other peer.

    Arguments after -- are passed to 'gossipx run'.

    \b
    gossipx launch slurm --nodes 4 -- train.py > job.sh
    """


def _job_options(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in (
        click.option("--name", default="gossipx", show_default=True, help="Name of the job."),
        debug,
        click.option("--gpus-per-peer", type=click.IntRange(0, 1024), default=0, help="Number of GPUs per peer."),
        click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS OF RUN...]"),
    ):
        command = decorate(command)
    return command


@launch_group.command("slurm")
@click.option("--nodes", type=click.IntRange(1, MOST), default=1, show_default=True, help="Number of machines.")
@click.option(
    "--peers-per-node", type=click.IntRange(1, 1024), default=1, show_default=True, help="Number of peers per machine."
)
@click.option("--time", help="Time limit of the job in SLURM's format: 2:00:00.")
@click.option("--partition", help="Partition of the cluster.")
@_job_options
def slurm_command(time: str | None, partition: str | None, **options: Any) -> None:
    """Print a script for sbatch.

    \b
    gossipx launch slurm --nodes 4 --peers-per-node 2 --time 2:00:00 -- train.py > job.sh
    sbatch job.sh
    """
    from gossipx.tools import jobs

    print(jobs.slurm_script(_job_of(**options), time, partition), end="")


@launch_group.command("kubernetes", short_help="Print a manifest for kubectl apply.")
@click.option("--peers", "nodes", type=click.IntRange(1, MOST), required=True, help="Number of peers, one pod each.")
@click.option(
    "--image",
    required=True,
    help="Container image that contains gossipx, as the repository's Dockerfile makes, and your script.",
)
@click.option("--claim", help="PersistentVolumeClaim for the run's directory, writable by all pods.")
@_job_options
def kubernetes_command(image: str, claim: str | None, **options: Any) -> None:
    """Print a manifest for kubectl apply: an Indexed Job, and the Service by which its pods find each other.

    \b
    gossipx launch kubernetes --peers 4 --image example.org/train:1 -- train.py > job.yaml
    kubectl apply -f job.yaml
    """
    from gossipx.tools import jobs

    print(jobs.kubernetes_manifest(_job_of(peers_per_node=1, **options), image, claim), end="")


def _job_of(name: str, nodes: int, peers_per_node: int, gpus_per_peer: int, arguments: tuple[str, ...]) -> ClusterJob:
    """Return the job. Settings that 'gossipx run' would refuse are refused here."""
    from gossipx.launch import start
    from gossipx.tools.jobs import ClusterJob

    given = dict(run_command.make_context("gossipx run", list(arguments)).params)
    file, script, resume = given.pop("config_file"), given.pop("script"), given.pop("resume")
    for other in NOT_OF_A_JOB:
        if (value := given.pop(other)) is not None and value is not False:
            raise UsageError(f"{_option(other)} has no use in a job: leave it out")
    known = files.load(file) if file is not None and Path(file).is_file() else {}  # it may exist only in the image
    settings = files.resolve(known, given)
    job = ClusterJob(name, nodes, peers_per_node, gpus_per_peer, settings, arguments, bool(script))
    if resume is None:  # a resumed run has its own settings
        start.presets(settings, job.peers, script, None)
    return job
