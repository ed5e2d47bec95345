"""``gossipx completion``: the script by which a shell completes commands."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class

from gossipx.cli.commands import debug

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_GOSSIPX_COMPLETE"
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


@click.command("completion", short_help="Print a shell completion script.")
@debug
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print a script by which the shell completes commands, options and their values.

    \b
    mkdir -p ~/.local/share/bash-completion/completions ~/.zfunc ~/.config/fish/completions
    gossipx completion bash > ~/.local/share/bash-completion/completions/gossipx
    gossipx completion zsh > ~/.zfunc/_gossipx
    gossipx completion fish > ~/.config/fish/completions/gossipx.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click supports all SHELLS"
    print(kind(ctx.find_root().command, {}, "gossipx", VARIABLE).source(), end="")
