"""The command group ``gossipx``, made with click, and its command ``completion``. Every error is one line."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

import click
from click.shell_completion import get_completion_class

from gossipx.cli.output import unfailing_output
from gossipx.cli.parsing import COMPLETION_VARIABLE, SHELLS, debug, help_for
from gossipx.errors import GossipxError, UsageError, printable
from gossipx.launch.environment import ENV_DEBUG

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
        if error.errno != errno.ENAMETOOLONG:  # a given path is too long: the first look at it fails
            raise
        print(f"{printable(str(error.filename), 100)}…: {error.strerror}", file=sys.stderr)
        sys.exit(UsageError.exit_code)
    except click.UsageError as error:
        if isinstance(error, _HELP):
            raise
        text = " ".join(error.format_message().split()).removesuffix(".")
        place = error.ctx or ctx
        print(f"{text} (see {place.command_path} {help_for(error, place.command)})", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


TRAINING = frozenset(("run", "simulate", "peer", "tune"))
"""Commands whose exit code tells of a training, also if their output is lost. The others only produce
output, so that they fail without it."""


class _Main(click.Group):
    """The command group, which prints every error as one line."""

    _invoked: str | None = None

    def main(self, *args: Any, **extra: Any) -> Any:
        self._invoked = None
        with unfailing_output() as why_incomplete:
            try:
                return super().main(*args, **extra)
            except SystemExit as end:
                if not end.code and why_incomplete() and self._invoked not in TRAINING:
                    raise SystemExit(1) from None
                raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with _one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line(ctx):
                return super().invoke(ctx)
        finally:
            self._invoked = ctx.invoked_subcommand


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="gossipx")
@debug
def main() -> None:
    """Decentralized peer-to-peer gossip training for PyTorch.

    \b
    gossipx run --peers hosts.txt train.py
    gossipx compare runs/tau runs/adaptive
    """


@main.command("completion", short_help="Print a shell completion script.")
@debug
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script by which the shell completes commands, options and their values.

    \b
    mkdir -p ~/.local/share/bash-completion/completions ~/.zfunc ~/.config/fish/completions
    gossipx completion bash > ~/.local/share/bash-completion/completions/gossipx
    gossipx completion zsh > ~/.zfunc/_gossipx
    gossipx completion fish > ~/.config/fish/completions/gossipx.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click supports all SHELLS"
    print(kind(ctx.find_root().command, {}, "gossipx", COMPLETION_VARIABLE).source(), end="")
