"""The command line of all benchmarks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from emulated import NetworkUnavailableError

from _bench.tables import Table

T = TypeVar("T")
Options = Mapping[str, Mapping[str, Any]]
"""Arguments of ``add_argument`` by the name of an option, such as ``--iterations``."""


class Given(argparse.Namespace):
    """The options of a benchmark.

    Attributes:
        smoke: whether it only has to be shown that the benchmark runs, within seconds.
        full: whether the tables of the docs are made.
        json: whether only the figures are printed.
    """

    smoke: bool
    full: bool
    json: bool

    def of(self, smoke: T, short: T, full: T) -> T:
        """Return the value for the size of the benchmark."""
        return smoke if self.smoke else full if self.full else short


Measure = Callable[[Given], Table | Iterable[Table]]


def parser_of(command: str, description: str | None, options: Options) -> argparse.ArgumentParser:
    """Return the parser of a command with its own options."""
    parser = argparse.ArgumentParser(
        prog=command, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="larger, as in the docs")
    parser.add_argument("--smoke", action="store_true", help="as small as possible: only shows that it runs")
    parser.add_argument("--json", action="store_true", help="print only the figures")
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    return parser


def bench(
    file: str,
    description: str | None,
    parts: Measure | Mapping[str, Measure],
    options: Options | None = None,
    smoke: Collection[str] = (),
) -> None:
    """Run a benchmark as the command line asks, and print its tables, or its figures as JSON.

    Args:
        file: of the benchmark, whose name it has.
        description: what ``--help`` prints.
        parts: makes its tables; several by name can be chosen with ``--only``.
        options: of its own.
        smoke: parts that are small enough for ``--smoke``; empty: all.
    """
    command = f"bin/bench {Path(file).stem}"
    options = dict(options or {})
    if not callable(parts):
        options["--only"] = {"choices": tuple(parts)}
    given = parser_of(command, description, options).parse_args(namespace=Given())
    torch.set_num_threads(1)  # like a peer
    figures: list[Any] = []
    try:
        for name, measure in {"": parts}.items() if callable(parts) else parts.items():
            if name in (given.only,) if name and given.only else not (given.smoke and smoke) or name in smoke:
                made = measure(given)
                for table in (made,) if isinstance(made, Table) else made:
                    figures += table.figures
                    if not given.json:
                        table.show()
    except NetworkUnavailableError as error:
        if not given.smoke:
            sys.exit(f"{command}: {error}")
        print(f"{command}: skipped: {error}", file=sys.stderr)
    if given.json:
        print(json.dumps({"figures": figures}, indent=2))


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an option that has some of the known names, separated by commas."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"'{name}' is not one of {', '.join(known)}")
        return chosen

    return names
