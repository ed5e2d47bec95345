"""The output of ``gossipx run --dry-run``."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from rich.table import Table

from gossipx.cli.tables import show

if TYPE_CHECKING:
    from gossipx.tools.dry_run import DryRun

FIXED_WITHIN = 0.01
"""The encoded size counts as fixed if it differs from the codec's bound by less than this fraction of the bound."""


def show_dry_run(found: DryRun, as_json: bool) -> None:
    """Print the peers, topology and expected traffic of a run."""
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    if found.notice is not None:
        print(found.notice, file=sys.stderr)
    tables = [_peers(found)]
    if found.topology is not None:
        table = Table("", found.topology.topology, title="Topology", title_justify="left")
        for what, value in found.topology.lines():
            if not what.startswith("..."):  # these assume equal slots per machine, unlike a hosts file
                table.add_row(what, value)
        tables.append(table)
    show(*tables, _traffic(found))
    for line in _notes(found):
        print(line)
    for warning in () if found.topology is None else found.topology.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _peers(found: DryRun) -> Table:
    here = sum(peer.here for peer in found.peers)
    title = f"{found.name}: {len(found.peers)} peers, {here} of them here. Nothing was started or written"
    table = Table(title=title, title_justify="left")
    for heading in ("rank", "name", "address", "device", "part", "where"):
        table.add_column(heading, justify="right" if heading == "rank" else "left", overflow="fold")
    for peer in found.peers:
        where = "here" if peer.here else "elsewhere"
        table.add_row(str(peer.rank), peer.name, peer.address, peer.device, peer.part, where)
    return table


def _traffic(found: DryRun) -> Table:
    unit = "" if found.model.is_known else ", per MB of model"
    title = f"Traffic of {found.iterations:,} iterations{unit}; {found.how}"
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("times per peer", "MB each way", "busiest peer's", f"s at {found.link}"):
        table.add_column(heading, justify="right")
    table.add_column("source")
    for number, one in enumerate(found.traffic):
        is_same = number > 0 and found.traffic[number - 1].policy == one.policy
        table.add_row(
            "" if is_same else one.policy,
            _range(one.exchanges, ",.0f"),
            _range(one.received_bytes, ",.4g", 1e-6),
            _range(one.busiest_bytes, ",.4g", 1e-6),
            _range(one.link_seconds, ",.3g"),
            one.known,
        )
    return table


def _range(pair: tuple[float, float], form: str, unit: float = 1.0) -> str:
    least, most = (format(value * unit, form) for value in pair)
    return least if least == most else f"{least} to {most}"


def _notes(found: DryRun) -> list[str]:
    model = found.model
    size = f"{model.exchanged_bytes / 1e6:.4g} MB"
    if not model.is_known:
        size = "unknown size: figures are per MB; give the size by --model-size 45MB"
    notes = [f"model {model.name}: {size}, codec {model.codec}"]
    if model.encoded_bytes != model.exchanged_bytes:
        most = model.encoded_at_most
        bound = "" if most is None else f", at most {most / 1e6:.4g} MB"
        is_fixed = most is not None and most - model.encoded_bytes < FIXED_WITHIN * most
        assuming = "" if is_fixed else f" for normally distributed values{bound}"
        notes[0] += f": {model.encoded_bytes / 1e6:.4g} MB{assuming}"
    if found.fragments > 1:
        part = model.encoded_bytes / found.fragments
        notes.append(f"an exchange moves one of {found.fragments} fragments: {part / 1e6:.4g} MB")
    notes.append(f"one exchange alone takes {found.exchange_seconds:.3g} s, at {found.exchange_rate}")
    if not found.between_machines:
        notes.append("all peers are on one machine: seconds assume a separate link for each")
    uncounted = []
    if found.start_bytes:
        uncounted.append(f"each peer but the first receives {found.start_bytes / 1e6:.4g} MB at the start")
    if found.finish_bytes:
        uncounted.append(f"each peer receives {found.finish_bytes / 1e6:.4g} MB on average in the finish")
    if uncounted:
        notes.append(f"not counted above: {', '.join(uncounted)}")
    if not found.is_length_known:
        notes.append(
            f"a script sets its own number of iterations: these figures assume --iterations {found.iterations}"
        )
    return notes
