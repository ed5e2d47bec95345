"""Command-line options generated from settings, and the short and long help of ``gossipx run``.

A run has too many options for one screen, so ``--help`` shows those that are declared as common, and ``--help-all``
shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from gossipx.cli import completers
from gossipx.settings.keys import Group, Key
from gossipx.settings.sections import KEYS

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
    kind: Any = (
        click.Choice(key.choices) if key.choices else str if key.many else None if key.kind is bool else key.kind
    )
    return click.option(
        names,
        key.name,
        cls=Option,
        common=key.common,
        default=None,
        type=kind,
        metavar=key.metavar,
        help=key.help + default if help is None else help,
        shell_complete=completers.for_setting(key),
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
    shell_complete=completers.paths("file"),
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


def _options(command: click.Command, ctx: click.Context) -> Iterator[click.Option]:
    return (one for one in command.get_params(ctx) if isinstance(one, click.Option))


def by_heading(command: click.Command, ctx: click.Context) -> dict[str, list[click.Option]]:
    """Return the common options of a command by heading, and under Help its two help options."""
    groups: dict[str, list[click.Option]] = {heading: [] for heading in (*get_args(Group), "Help")}
    for one in _options(command, ctx):
        if isinstance(one, Option) and one.common:
            groups[one.common].append(one)
        elif not {"--help", "--help-all"}.isdisjoint(one.opts):
            groups["Help"].append(one)
    groups["Help"].reverse()  # click appends --help last
    return groups


def by_table(command: click.Command, ctx: click.Context) -> dict[str, list[click.Option]]:
    """Return all options of a command by the TOML table of their setting."""
    groups: dict[str, list[click.Option]] = {}
    for one in _options(command, ctx):
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
