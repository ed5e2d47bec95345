"""Sphinx configuration of the documentation, for ``bin/docs`` and, with warnings as errors, for ``bin/test``.

The build needs no network. It is Sphinx rather than MkDocs with its Material theme, since these get no new features any
more, and since Sphinx checks each cross-reference of the docstrings.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from importlib.metadata import version as installed
from inspect import cleandoc
from pathlib import Path

import click
from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fault_marks import marked

from gossipx import codecs  # of the same tree as these pages
from gossipx.cli.parsing import RunCommand, by_heading, by_table
from gossipx.settings.modes import MODES
from gossipx.settings.sections import KEYS
from gossipx.specs.codecs import CODECS

project = "gossipx"
version = release = installed("gossipx")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
smartquotes = False  # options begin with two hyphens, in headings too
nitpicky = True
nitpick_ignore_regex = [
    # Names of other projects, whose inventories are on the network.
    (r"py:.*", r"(torch|numpy|pathlib|collections|contextlib|types|typing|abc|enum)\..*"),
    # Internal types that CommManager's signatures name.
    (
        r"py:class",
        r"gossipx\.(protocol|memory|wire|transports)\..*|Address|JoinedPeer|OnRequest|SinkFor|Transport|Carriers|auth.Secrets",
    ),
    (r"py:class", r"Request|Reply|TypeAliasForwardRef|gossipx\.server\.placement\.S"),
]

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # an implementation of a base's method is documented at the base
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Request": "Request", "Reply": "Reply"}  # unions of about twenty kinds
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"gossipx {release}"
html_static_path = ["_static"]
html_css_files = ["gossipx.css"]
html_copy_source = False
html_show_copyright = False


def _examples(app: Sphinx, ctx: click.Context, lines: list[str]) -> None:
    """Turn the lines of commands in a help text into a code block."""
    shown: list[str] = []
    for line in lines:
        if not line.startswith("| "):
            shown.append(line)
            continue
        if not shown or not shown[-1].startswith("   "):
            shown += ["", ".. code-block:: bash", ""]
        shown.append(f"   {line[2:]}")
    lines[:] = [*shown, ""]


def _options(app: Sphinx, ctx: click.Context, lines: list[str]) -> None:
    """Show the common options of a run first, then all by TOML table. --debug is shown once, for the main command."""
    entries: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(".. option:: "):
            entry = entries.setdefault(line.split()[2].strip(","), [])
        entry.append(line)
    if ctx.parent:
        entries.pop("--debug", None)
    if isinstance(ctx.command, RunCommand):
        lines[:] = _common(ctx.command, ctx)
        for heading, options in by_table(ctx.command, ctx).items():
            lines += [f"**{heading}**", "", *(line for one in options for line in entries.get(one.opts[0], ()))]
    else:
        lines[:] = [line for entry in entries.values() for line in entry]


def _common(command: click.Command, ctx: click.Context) -> list[str]:
    """List the common options under their headings, each with a link to its entry in the full list."""
    lines = []
    for heading, options in by_heading(command, ctx).items():
        shown = [one for one in options if one in command.params]  # sphinx-click has no entry for click's own --help
        lines += [f"**{heading}**", ""]
        lines += [f"- :option:`{one.opts[0]} <{ctx.command_path} {one.opts[0]}>`: {one.help}" for one in shown]
        lines.append("")
    return [*lines, "All options, settings by their TOML table:", ""]


def _words(app: Sphinx, page: nodes.document) -> None:
    """Replace words that Sphinx adds to docstrings; smartquotes would turn the hyphens of options into dashes too."""
    better = {" -- ": " – ", "Variables": "Attributes"}
    for text in list(page.findall(nodes.Text)):
        if text in better:
            text.parent.replace(text, nodes.Text(better[text]))


def _faults(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the tests that prove each row to the table of faults."""
    if page != "faults":
        return
    tests = marked()
    lines = []
    for line in source[0].splitlines():
        cells = line.split(" | ")
        if line.startswith("| # "):
            line += " tests |"
        elif line.startswith("|---"):
            line += "---|"
        elif line.startswith("| "):
            line += f" {_proofs(tests.get(int(cells[0].strip('| ')), {}))} |"
        lines.append(line)
    source[0] = "\n".join(lines)


def _codecs(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the table of codecs in place of its directive, from the declared table and the docstrings of the classes."""
    if page != "codecs":
        return
    rows = ["| codec | sent | bits per value | error feedback |", "|---|---|---|---|"]
    for name, kind in codecs.BUILT_IN.items():
        keys = {key.name: key.default for key in dataclasses.fields(kind) if not key.kw_only}
        shared = {key.name: key.default for key in dataclasses.fields(kind) if key.kw_only}
        spec = name + ":" * bool(keys) + ",".join(f"{key}={value:g}" for key, value in keys.items())
        summary, _, rest = cleandoc(kind.__doc__ or "").removeprefix(f"``{name}``: ").partition("\n\n")
        meant = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", rest.partition("Attributes:\n")[2], re.MULTILINE)
        scope = "For gradients only." if kind.gradients_only else ""
        text = " ".join([summary, scope, *(f"`{key}`: {what}" for key, what in meant)])
        text = re.sub(r":\w+:`([^`]*)`|``([^`]*)``", r"`\1\2`", " ".join(text.split())).replace("|", "\\|")
        rows.append(f"| `{spec}` | {text} | {CODECS[name].bits} | {'yes' if shared['feedback'] else 'no'} |")
    source[0] = source[0].replace("```{codecs}\n```", "\n".join(rows))


def _modes(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the table of the settings that only some modes have in place of its directive, from their declarations."""
    if page != "command-line":
        return
    rows = [
        "| setting | " + " | ".join(mode.__name__.lower() for mode in MODES) + " |",
        "|---" * (len(MODES) + 1) + "|",
    ]
    has = {mode: {field.name for field in dataclasses.fields(mode)} for mode in MODES}
    for name in sorted(set.union(*has.values()), key=list(KEYS).index):
        marks = ["x" if name in has[mode] else "" for mode in MODES]
        rows.append(f"| `{KEYS[name].option}` | {' | '.join(marks)} |")
    source[0] = source[0].replace("```{modes}\n```", "\n".join(rows))


def _proofs(by_file: dict[str, list[str]]) -> str:
    few = 3  # more names in a cell would hide the table
    return "; ".join(
        f"`{file}`: {', '.join(names) if len(names) <= few else f'{len(names)} tests'}"
        for file, names in by_file.items()
    )


def setup(app: Sphinx) -> None:
    app.connect("source-read", _faults)
    app.connect("source-read", _codecs)
    app.connect("source-read", _modes)
    app.connect("doctree-read", _words)
    app.connect("sphinx-click-process-description", _examples)
    app.connect("sphinx-click-process-epilog", _examples)
    app.connect("sphinx-click-process-options", _options)
