"""Texts that gossipx writes for others to read: a template of jinja2 each, filled with values."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def filled(template: str, **values: object) -> str:
    """Return a template of this folder with these values, which are escaped if it is HTML."""
    templates = Environment(
        loader=PackageLoader("gossipx.tools", "templates"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template(template).render(values)
