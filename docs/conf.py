"""Builds the documentation: ``bin/docs``, and in ``bin/test`` with every warning an error. No network is needed.

Sphinx, and not Material for MkDocs: that one and MkDocs itself get no new features any more, and Sphinx checks each
cross-reference of the docstrings.
"""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path

import click
from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from gossipx.cli.options import RunCommand, by_heading, by_table  # of the tree that these pages stand in

project = "gossipx"
version = release = installed("gossipx")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
smartquotes = False  # options begin with two hyphens, in headings too
nitpicky = True
nitpick_ignore_regex = [
    # Other projects' names: their inventories are on the network.
    (r"py:.*", r"(torch|numpy|pathlib|collections|contextlib|types|typing|abc|enum)\..*"),
    # What only drivers and transports make; CommManager's signatures name it.
    (
        r"py:class",
        r"gossipx\.(protocol|memory|wire|transports)\..*|Address|OnRequest|RoomFor|Transport|Carriers|auth.Secret",
    ),
    (r"py:class", r"Request|Reply|TypeAliasForwardRef|gossipx\.server\.placement\.methods\.S"),
]

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # what a subclass only implements is told once
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Request": "Request", "Reply": "Reply"}  # of twenty kinds each
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
    """Commands in a help text stand line by line there, after a blank line; here they are code."""
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
    """Show the common options of a run first, then all by TOML table. --debug is told once, at the top."""
    told: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith(".. option:: "):
            into = told.setdefault(line.split()[2].strip(","), [])
        into.append(line)
    if ctx.parent:
        told.pop("--debug", None)
    if isinstance(ctx.command, RunCommand):
        lines[:] = _common(ctx.command, ctx)
        for heading, options in by_table(ctx.command, ctx).items():
            lines += [f"**{heading}**", "", *(line for one in options for line in told.get(one.opts[0], ()))]
    else:
        lines[:] = [line for one in told.values() for line in one]


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
    """What Sphinx makes of docstrings, in their own words; smartquotes would make dashes of options as well."""
    better = {" -- ": " – ", "Variables": "Attributes"}
    for text in list(page.findall(nodes.Text)):
        if text in better:
            text.parent.replace(text, nodes.Text(better[text]))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _words)
    app.connect("sphinx-click-process-description", _examples)
    app.connect("sphinx-click-process-epilog", _examples)
    app.connect("sphinx-click-process-options", _options)
