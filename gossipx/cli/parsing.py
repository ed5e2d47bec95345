"""The words of a command line: options made from settings, and their completion by the shell.

A run has too many options for one screen, so ``--help`` shows those that are declared as common, and ``--help-all``
shows all of them. For each press of the Tab key the shell starts a process, so this module must import quickly. Names
that are defined in modules that import torch, numpy or networkx are therefore repeated here; a test checks that both
lists agree. All other names are imported from their modules when they are completed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from gossipx.launch.environment import ENV_DEBUG
from gossipx.settings.keys import Group, Key
from gossipx.settings.sections import KEYS

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
"""A completion function, click's ``shell_complete``: from (context, parameter, typed text) to the offered items."""

TOPOLOGIES = (
    *("full", "ring", "star", "grid", "torus", "hypercube", "exponential", "expander", "regular", "small-world"),
    *("erdos-renyi", "hierarchical", "bipartite"),
)
SCHEDULES = ("random", "static", "one-peer", "inner-outer", "bandwidth-aware")
PARTITIONS = ("iid", "dirichlet", "contiguous")
DEVICES = ("cpu", "cuda", "cuda:0")


def complete_from(*known: Iterable[str] | str, otherwise: str = "") -> Completer:
    """Return a completion function that offers the known names that start with the typed text.

    Args:
        known: names; or where they are, ``module:name`` of names or of a function that returns them.
        otherwise: what the shell completes if no name matches, ``file`` or ``dir``; empty: nothing.
    """

    def complete(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        names = (name for one in known for name in (_names_at(one) if isinstance(one, str) else one))
        offered = [CompletionItem(name) for name in names if name.startswith(typed)]
        return offered if offered or not otherwise else [CompletionItem(typed, type=otherwise)]

    return complete


def _names_at(place: str) -> Iterable[str]:
    module, _, name = place.partition(":")
    found: Any = getattr(import_module(module), name)
    names: Iterable[str] = found() if callable(found) else found
    return names


def _complete_codec(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    from gossipx.specs import plugins
    from gossipx.specs.codecs import CODECS, ENTRY_POINT_GROUP

    # Only the names count here: ``str`` stands for what builds a codec, which would import torch.
    return complete_from(plugins.names(dict.fromkeys(CODECS, str), ENTRY_POINT_GROUP))(ctx, parameter, typed)


def complete_run(ctx: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Offer names of runs in ``--logdir``; if none matches, directories."""
    logdir = Path(ctx.params.get("logdir") or "runs")
    value = ctx.params.get(parameter.name or "") or ()  # a tuple if several may be given
    given = {str(name) for name in value} if isinstance(value, tuple) else set()
    found = (file.parent.name for file in sorted(logdir.glob("*/config.toml")))
    return complete_from([name for name in found if name not in given], otherwise="dir")(ctx, parameter, typed)


complete_file = complete_from(otherwise="file")
complete_topology = complete_from(TOPOLOGIES)
complete_schedule = complete_from(SCHEDULES)
complete_sync_model = complete_from("gossipx.server.sync_models:SYNC_MODELS")

COMPLETERS: dict[str, Completer] = {
    **dict.fromkeys(("peers", "secret_file", "tls_cert", "tls_key", "tls_ca"), complete_file),
    **dict.fromkeys(("logdir", "data_dir"), complete_from(otherwise="dir")),
    **dict.fromkeys(("codec", "push_codec", "pull_codec"), _complete_codec),
    "name": complete_run,
    "device": complete_from(DEVICES),
    "task": complete_from("gossipx.tasks.presets:TASKS"),
    "model": complete_from("gossipx.tasks.presets:PRESETS"),
    "partition": complete_from(PARTITIONS),
    "policy": complete_from("gossipx.policies:names"),
    "topology": complete_topology,
    "schedule": complete_schedule,
    "mixing": complete_from("gossipx.mixing:MIXINGS"),
    "outer": complete_from("gossipx.outer:OUTERS"),
    "recorder": complete_from("gossipx.recorders:recorder_names"),
    "sync": complete_sync_model,  # --sync, of a parameter server
    "placement": complete_from("gossipx.server.placement:BUILT_IN"),
}
"""Completion functions by setting; those of others are left to click, which completes choices only."""


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


_ALL = "gossipx.help-all"
"""Key in a context's ``meta``; set while the help must show every option."""


class Option(click.Option):
    """An option that may be common.

    Args:
        common: heading under which ``--help`` shows it; None: only ``--help-all`` shows it.
    """

    def __init__(self, *args: Any, common: Group | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.common = common


def option(key: Key, help: str | None = None) -> Callable[[Any], Any]:
    """Return the decorator that adds a setting's option to a command; ``help`` replaces the setting's."""
    names = f"{key.option}/--no-{key.name.replace('_', '-')}" if key.kind is bool else key.option
    default = "" if key.default is None else f"  [default: {str(key.default).lower()}]"
    # A list is typed as one text, 0.3,0.6, which gossipx.settings.files splits. A flag has no type in click.
    kind: Any = (
        click.Choice(key.choices) if key.choices else str if key.many else None if key.kind is bool else key.kind
    )
    return click.option(
        names,
        key.name,
        cls=Option,
        common=key.common,
        default=None,  # not given: the value is that of the TOML file, and only then the default
        type=kind,
        metavar=key.metavar,
        help=key.help + default if help is None else help,
        shell_complete=COMPLETERS.get(key.name),
    )


def options(*names: str, help: Mapping[str, str] | None = None) -> Callable[[Any], Any]:
    """Return the decorator that adds the options of several settings to a command, in this order; ``help`` as above."""

    def decorate(command: Any) -> Any:
        for name in reversed(names):
            command = option(KEYS[name], (help or {}).get(name))(command)
        return command

    return decorate


ACCESS = ("secret_file", "tls_cert", "tls_key", "tls_ca")
"""Settings by which a process is authorised."""
logdir_option = click.option(
    "--logdir", type=click.Path(path_type=Path), default=Path("runs"), help="Directory that contains the runs."
)
script_argument = click.argument(
    "script",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[SCRIPT [ARGS]...]",
    shell_complete=complete_file,
)


class RunCommand(click.Command):
    """A command whose help shows the common options by heading, or all options by the TOML table of their setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # click does not set it if an option lacks its value
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = by_table(self, ctx) if ctx.meta.get(_ALL) else by_heading(self, ctx)
        shown = {
            heading: [record for one in options if (record := one.get_help_record(ctx)) is not None]
            for heading, options in groups.items()
        }
        # The short help aligns all headings; in the long help a few long names would leave no room for the text.
        width = 0 if ctx.meta.get(_ALL) else max(len(name) for records in shown.values() for name, _ in records)
        for heading, records in shown.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in records])


def _options_of_command(command: click.Command, ctx: click.Context) -> Iterator[click.Option]:
    return (one for one in command.get_params(ctx) if isinstance(one, click.Option))


def by_heading(command: click.Command, ctx: click.Context) -> dict[str, list[click.Option]]:
    """Return the common options of a command by heading, and under Help its two help options."""
    groups: dict[str, list[click.Option]] = {heading: [] for heading in (*get_args(Group), "Help")}
    for one in _options_of_command(command, ctx):
        if isinstance(one, Option) and one.common:
            groups[one.common].append(one)
        elif not {"--help", "--help-all"}.isdisjoint(one.opts):
            groups["Help"].append(one)
    groups["Help"].reverse()  # click appends --help last
    return groups


def by_table(command: click.Command, ctx: click.Context) -> dict[str, list[click.Option]]:
    """Return all options of a command by the TOML table of their setting."""
    groups: dict[str, list[click.Option]] = {}
    for one in _options_of_command(command, ctx):
        key = KEYS.get(one.name or "")
        groups.setdefault(f"Settings, [{key.table}] in TOML" if key else "Options", []).append(one)
    return groups


def _show_all(ctx: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


help_all = click.option(
    "--help-all",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_all,
    help="Show all options, including other modes of exchange, codecs, limits and checkpoints.",
)


def help_for(error: click.UsageError, command: click.Command) -> str:
    """Return the help option of a command that shows the option in which an error occurred."""
    if not isinstance(command, RunCommand):
        return "--help"
    parameter = getattr(error, "param", None)
    if isinstance(error, click.BadOptionUsage):
        parameter = next((one for one in command.params if error.option_name in one.opts), None)
    return "--help" if isinstance(parameter, Option) and parameter.common else "--help-all"


SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_GOSSIPX_COMPLETE"
"""Environment variable by which the shell's script requests completions; click defines its name."""


@add_completion_class
class Bash(BashComplete):
    """Completion for Bash, which splits words at = and :, while click expects a whole value directly
    behind its option."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the word to complete, and that word."""
        before, typed = super().get_completion_args()
        words: list[str] = []
        continues = False
        for word in (*before, typed):
            if words and (continues or word == ":"):
                words[-1] += word
            else:
                words.append(word)
            continues = word == ":"
        return [word for word in words[:-1] if word != "="], words[-1]
