"""Answers to options and commands of other tools, with those of gossipx that do the same.

All of it is read from the declarations: from the options and arguments of the commands, and from the words that
:mod:`gossipx.settings.sections` gives as those of other tools.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from gossipx.settings import scenario
from gossipx.settings.sections import KEYS


def option_meant(name: str, ctx: click.Context) -> str:
    """Return what to write instead of an option that the command of ``ctx`` does not have; empty: unknown."""
    command, word = ctx.command, name.lstrip("-").replace("_", "-")
    arguments = {one.name: one.make_metavar(ctx) for one in command.params if isinstance(one, click.Argument)}
    if word in arguments:
        return f"give it as an argument, {ctx.command_path} {arguments[word]}"
    own = {one: parameter for parameter in command.params for one in parameter.opts}
    key = next((key for key in KEYS.values() if word in key.others and key.option in own), None)
    if key is not None:
        help = key.help.split(". ")[0].rstrip(".")
        after = "; options of SCRIPT stand after it" if "script" in arguments else ""
        return f"{key.option} {own[key.option].make_metavar(ctx)} does that here ({help}){after}"
    if "scenario" in arguments and (key := (KEYS | scenario.OWN).get(word.replace("-", "_"))):
        return f"write {key.name} = ... under [{key.table}] in SCENARIO"
    if f"{name}s" in own:
        return f"did you mean '{name}s'?"
    root = ctx.find_root()
    having = [path for path, one in _commands(root.command, root.command_path) if _has(one, name)]
    return f"it belongs to '{having[0]}'" if having else ""


def command_meant(word: str, ctx: click.Context) -> str:
    """Return what to write instead of a command that gossipx does not have; empty: unknown."""
    root, commands = ctx.command_path, list(_commands(ctx.command, ctx.command_path))
    if word in ("help", "version"):
        return f"{root} --{word}"
    if (file := Path(word)).suffix and file.is_file():
        return f"{root} run --peers {f'hosts.txt {word}' if file.suffix == '.py' else word}"
    named = [path for path, _ in commands if path.split()[-1] == word]
    doing = [path for path, one in commands if (one.short_help or "").lower().replace(",", "").split()[:1] == [word]]
    having = [f"{path} --{word}" for path, one in commands if _has(one, f"--{word}")]
    return ", ".join(dict.fromkeys(doing + named)) or "".join(having[:1])


def _commands(group: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group and of its groups, with the words that call them; first those that train."""
    inner = group.commands if isinstance(group, click.Group) else {}
    for name, command in sorted(inner.items(), key=lambda item: (item[0] != "run", item[0])):
        yield f"{path} {name}", command
        yield from _commands(command, f"{path} {name}")


def _has(command: click.Command, option: str) -> bool:
    return any(option in parameter.opts for parameter in command.params if isinstance(parameter, click.Option))
