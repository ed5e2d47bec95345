"""``gossipx completion``: what has a shell complete the commands."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class

from gossipx.cli.commands import debug

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_GOSSIPX_COMPLETE"
"""By which the shell's script asks; its name is click's."""


@add_completion_class
class Bash(BashComplete):
    """Bash cuts words at = and at :, and click looks for a value whole and right behind its option."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to be completed, and that."""
        before, typed = super().get_completion_args()
        words: list[str] = []
        goes_on = False
        for word in (*before, typed):
            if words and (goes_on or word == ":"):
                words[-1] += word
            else:
                words.append(word)
            goes_on = word == ":"
        return [word for word in words[:-1] if word != "="], words[-1]


@click.command("completion")
@debug
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script that has the shell complete commands, options and their values.

    \b
    mkdir -p ~/.local/share/bash-completion/completions ~/.zfunc ~/.config/fish/completions
    gossipx completion bash > ~/.local/share/bash-completion/completions/gossipx
    gossipx completion zsh > ~/.zfunc/_gossipx
    gossipx completion fish > ~/.config/fish/completions/gossipx.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "SHELLS are those of click"
    print(kind(ctx.find_root().command, {}, "gossipx", VARIABLE).source(), end="")
