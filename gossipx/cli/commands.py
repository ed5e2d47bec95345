"""The command group ``gossipx`` and its commands ``run`` and ``certs``, made with click.

The options of ``run`` are generated from the declarations in :mod:`gossipx.settings.sections`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from gossipx.cli import completers
from gossipx.cli.meant import command_meant, option_meant
from gossipx.cli.options import Option, RunCommand, help_all, help_for, options, script_argument
from gossipx.cli.output import unfailing
from gossipx.errors import GossipxError, UsageError, printable
from gossipx.launch.environment import ENV_DEBUG
from gossipx.launch.world.launchers import LaunchWorld, find, with_options
from gossipx.settings import files
from gossipx.settings.sections import KEYS, RunConfig

if TYPE_CHECKING:
    from gossipx.launch.run.ssh import Command as OverSsh

_HELP: tuple[type[BaseException], ...] = tuple(filter(None, [getattr(click.exceptions, "NoArgsIsHelpError", None)]))
"""The exception by which click, from 8.2, shows the help of a group that is called without a command."""


@contextlib.contextmanager
def _one_line(ctx: click.Context) -> Iterator[None]:
    """Print every error of gossipx or of its usage as one line, and exit with its code."""
    try:
        yield
    except GossipxError as error:
        if os.environ.get(ENV_DEBUG):
            raise
        print(*map(printable, str(error).splitlines()), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a path that was given, wherever it is looked at first
            raise
        print(f"{printable(str(error.filename), 100)}…: {error.strerror}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except click.UsageError as error:
        if isinstance(error, _HELP):
            raise
        text = " ".join(error.format_message().split()).removesuffix(".")
        place = error.ctx or ctx
        if isinstance(error, click.NoSuchOption) and (meant := option_meant(error.option_name, place)):
            text = f"No such option '{error.option_name}': {meant}"
        print(f"{text} (see {place.command_path} {help_for(error, place.command)})", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


TRAINING = frozenset(("run", "simulate", "peer", "tune"))
"""Commands whose exit code tells of a training, also if their output is lost; for the others it is all they do."""


class _Main(click.Group):
    """The command group, which prints every error as one line."""

    def main(self, *args: Any, **extra: Any) -> Any:
        self._invoked = None
        with unfailing() as lost:
            try:
                return super().main(*args, **extra)
            except SystemExit as end:
                if not end.code and lost() and self._invoked not in TRAINING:
                    raise SystemExit(1) from None
                raise

    _invoked: str | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line(ctx):
                return super().invoke(ctx)
        finally:
            self._invoked = ctx.invoked_subcommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if self.get_command(ctx, word) is None and not ctx.resilient_parsing and (meant := command_meant(word, ctx)):
            ctx.fail(f"No such command '{word}': {meant}")
        return super().resolve_command(ctx, args)


def _set_debug(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        os.environ[ENV_DEBUG] = "1"  # the peers inherit it and show their tracebacks too


debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_set_debug,
    help="Show a traceback with an error.",
)


class FloatRange(click.FloatRange):
    """A range of numbers that also refuses NaN, for which click's comparisons are false."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if math.isnan(converted := super().convert(value, param, ctx)):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return converted


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gossipx")
@debug
def main() -> None:
    """Decentralized peer-to-peer gossip training for PyTorch.

    \b
    gossipx run --peers hosts.txt train.py
    gossipx compare runs/tau runs/adaptive
    """


@main.command(
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
    shell_complete=completers.runs(),
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
@click.option(
    "--rank", type=click.IntRange(0), help="Rank of this process, if it is one peer.  [default: GOSSIPX_RANK]"
)
@click.option("--size", type=click.IntRange(1), help="With --rank: number of peers.  [default: GOSSIPX_SIZE]")
@click.option("--master", metavar="HOST[:PORT]", help="With --rank: where rank 0 listens.  [default: GOSSIPX_MASTER]")
@options(*KEYS)
@debug
@help_all
@script_argument
def run(
    config_file: Path | None,
    resume: str | None,
    seeds: str | None,
    ssh: bool,
    dry_run: bool,
    link: str | None,
    model_size: str | None,
    as_json: bool,
    rank: int | None,
    size: int | None,
    master: str | None,
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
    # peers, topology and expected traffic; starts nothing
    gossipx run --peers hosts.txt --dry-run --link 100mbit
    # started by torchrun or SLURM: each process is one peer
    torchrun --nproc-per-node 4 --no-python gossipx run
    srun gossipx run
    """
    from gossipx.launch.run.processes import launch
    from gossipx.launch.run.ssh import Command
    from gossipx.launch.world.source import source_of

    _check_together(resume, seeds, settings["seed"], dry_run, ssh, link, model_size, as_json)
    environ = with_options(os.environ, rank, size, master)
    over_ssh = Command(settings, config_file, resume, script) if ssh else None
    if resume is not None:
        if config_file:
            raise UsageError("--config is for a new run, but --resume uses the settings of the run: leave one out")
        sys.exit(_resume(resume, settings, list(script), environ, over_ssh))
    given = files.load(config_file) if config_file else {}
    resolved = files.resolve(given, settings)
    hosts = None if resolved.run.peers is None else Path(resolved.run.peers)
    source = source_of(hosts, script, environ)
    if dry_run:
        world = find(environ) if source.launcher else None
        _dry_run(resolved, source.hosts, list(script), world, link, model_size, as_json)
    elif seeds is not None:
        from gossipx.launch.run.several_seeds import launch_each, parse

        sys.exit(launch_each(source, resolved, parse(seeds), list(script)))
    else:
        sys.exit(launch(source, resolved, list(script), over_ssh=over_ssh).code)


def _resume(
    run: str, settings: Mapping[str, Any], script: list[str], environ: Mapping[str, str], over_ssh: OverSsh | None
) -> int:
    from gossipx.launch.directory.resume import peers_before, settings_of
    from gossipx.launch.run.processes import launch
    from gossipx.launch.world.source import source_of

    world = find(environ)
    started = None if world is None else (world.size, world.source)
    resolved, hosts, script = settings_of(run, settings, script, started)
    source = source_of(hosts, script, environ)
    return launch(source, resolved, script, resumes=peers_before(resolved), over_ssh=over_ssh).code


def _check_together(
    resume: str | None,
    seeds: str | None,
    seed: int | None,
    dry_run: bool,
    ssh: bool,
    link: str | None,
    model_size: str | None,
    as_json: bool,
) -> None:
    """Refuse options of ``gossipx run`` that exclude or require each other."""
    for name, is_given in (("--link", link), ("--model-size", model_size), ("--json", as_json)):
        if is_given and not dry_run:
            raise UsageError(f"{name} requires --dry-run: add that, or leave it out")
    for other, is_given in (("--dry-run", dry_run), ("--seeds", seeds is not None)):
        if ssh and is_given:
            raise UsageError(f"--ssh starts one run, and {other} does not: leave one out")
    if dry_run and resume is not None:
        raise UsageError("--dry-run shows a new run: leave --resume out")
    if seeds is None:
        return
    for other, is_given in (("--resume", resume is not None), ("--dry-run", dry_run), ("--seed", seed is not None)):
        if is_given:
            raise UsageError(f"--seeds starts several new runs, and {other} is for one: leave one out")


def _dry_run(
    settings: RunConfig,
    hosts: Path | None,
    script: list[str],
    world: LaunchWorld | None,
    link: str | None,
    model_size: str | None,
    as_json: bool,
) -> None:
    from gossipx.cli.dry_run import show_dry_run
    from gossipx.tools.dry_run import dry_run as examine

    if hosts is None:
        raise UsageError("--dry-run requires a hosts file: give --peers hosts.txt")
    with Console(stderr=True).status("with many peers this may take minutes"):  # shown on a terminal only
        found = examine(settings, hosts, script, link, model_size, world)
    show_dry_run(found, as_json)


@main.group()
def certs() -> None:
    """Certificates for mutual TLS.

    \b
    gossipx certs new certs hosts.txt
    """


@certs.command("new", short_help="Create a private CA and a certificate per host.")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("hosts", type=click.Path(path_type=Path), metavar="HOSTS")
@debug
def certs_new(directory: Path, hosts: Path) -> None:
    """Create a private CA in DIR and a certificate for each host of the HOSTS file.

    \b
    gossipx certs new certs hosts.txt
    """
    from gossipx.tools import certs as authority

    for line in authority.new(directory, hosts):
        print(line)
