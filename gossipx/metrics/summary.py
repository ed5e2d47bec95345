"""The summary of a run that has finished or was stopped, ``summary.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import msgspec

from gossipx.errors import MALFORMED, GossipxError, UsageError, printable
from gossipx.figures import COUNTED, PER_PEER, renamed
from gossipx.protocol.fields import Whole
from gossipx.specs import texts

FILE = "summary.json"
PerPeer = list[float | None]
"""One number per peer, by rank; None for a peer that did not finish."""
Number: TypeAlias = Whole | float  # integers in JSON are unbounded


@dataclass(frozen=True)
class Summary:
    """The metrics of a run.

    A resumed run counts from its beginning: everything that led to its final models. Work after the last checkpoint,
    which was lost, does not count.

    Attributes:
        name: name of the run.
        policy: the policy's spec.
        codec: codec of models on the wire.
        seed: seed of the run.
        peers: number of peers, with those that joined the run while it was in progress.
        task: the data set; None for a user's script.
        model: the model; None for a user's script.
        partition: how the data were divided among peers.
        iterations: length of the run.
        consensus_accuracy: on test data, of the average of all final models.
        consensus_loss: the same of the loss.
        agreed: whether all peers that finished hold the same model, bit by bit; False also if the peers that were seen
            to end are not most of those in the finish; None: the run has no finish, so that nothing is claimed.
        lost: names of peers that did not finish.
        stopped: names of peers that were stopped before the finish, by a signal; their figures are those until then.
        wall_seconds: from the first peer's first iteration to the last peer's end.
        figures: one list for each of ``gossipx.figures.PER_PEER``, by name, with one number per peer, by rank; None
            for a peer that was lost. Each is also an attribute, such as ``retrievals``.
    """

    name: str
    policy: str
    codec: str
    seed: Whole
    peers: Whole
    task: str | None
    model: str | None
    partition: str
    iterations: Whole
    consensus_accuracy: Number | None
    consensus_loss: Number | None
    agreed: bool | None
    lost: list[str]
    stopped: list[str]
    wall_seconds: Number
    figures: dict[str, PerPeer]

    def __getattr__(self, name: str) -> PerPeer:
        figures: dict[str, PerPeer] = vars(self).get("figures", {})  # empty while an object is being copied
        if name not in figures:
            raise AttributeError(f"a summary has no figure '{name}'")
        return figures[name]

    def with_figures(self, figures: Mapping[str, PerPeer]) -> Summary:
        """Return this summary with other figures for some names."""
        return dataclasses.replace(self, figures=self.figures | dict(figures))

    def as_dict(self) -> dict[str, Any]:
        """Return it as it is written: one flat object."""
        return {name: value for name, value in vars(self).items() if name != "figures"} | self.figures

    def of_training(self, figures: PerPeer) -> PerPeer:
        """Return the figures of the peers that train; peers that were lost are left out."""
        return [value for value, blocked in zip(figures, self.blocked_seconds, strict=True) if blocked is not None]

    def of_serving(self, figures: PerPeer) -> PerPeer:
        """Return the figures of the peers that only serve others; there is nothing of theirs to block."""
        present = zip(figures, self.blocked_seconds, self.train_seconds, strict=True)
        return [value for value, blocked, seconds in present if blocked is None and seconds is not None]

    def write(self, directory: Path, by: int | None = None) -> None:
        """Write the file atomically.

        Args:
            by: number of this process, if several may write at the same time.

        Raises:
            GossipxError: it cannot be written; an existing one stays.
        """
        unfinished = directory / f"{FILE}{'' if by is None else f'.{by}'}.tmp"
        try:
            unfinished.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")
            unfinished.replace(directory / FILE)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise GossipxError(f"{directory / FILE}: the summary cannot be written ({error.strerror})") from error

    def completed(self, other: Summary) -> Summary:
        """Return this summary with the figures that another one of the same run has of peers that are lost here."""
        both = {
            name: [ours if theirs is None else theirs for ours, theirs in zip(known, self.figures[name], strict=True)]
            for name, known in other.figures.items()
        }
        return dataclasses.replace(
            self,
            iterations=max(self.iterations, other.iterations),
            agreed=False if other.agreed is False else self.agreed,
            lost=[name for name in self.lost if name in other.lost],
            stopped=sorted({*self.stopped, *(name for name in other.stopped if name in self.lost)}),
            figures=both,
        )


def per_peer(reports: Sequence[Mapping[str, Any] | None]) -> dict[str, PerPeer]:
    """Return the lists of a summary from the peers' reports, by rank; None for a peer without one."""
    return {name: [None if report is None else report.get(name) for report in reports] for name in PER_PEER}


def agreed(reports: Sequence[Mapping[str, Any] | None]) -> bool | None:
    """Return whether the peers' reports name the same final model; None: no report makes a claim."""
    digests = [str(report["digest"]) for report in reports if report and report.get("digest") is not None]
    return "" not in digests and len(set(digests)) == 1 if digests else None


def reported(key: str, reports: Sequence[Mapping[str, Any] | None], configured: str) -> str:
    """Return the value that the peers report, if any: a script may pass an object that no setting names."""
    return next((str(report[key]) for report in reports if report and key in report), configured)


def read(path: Path) -> Summary:
    """Read the summary of a run from its directory or its file.

    Raises:
        UsageError: the file is missing or is not a summary.
    """
    file = path / FILE if texts.found(path) == "folder" else path
    text = texts.read(file, "summary", missing="no summary here: name the directory of a finished run")
    try:
        data = json.loads(text)
    except MALFORMED as error:
        raise UsageError(f"not a summary: {error}", file) from error
    if not isinstance(data, dict):
        raise UsageError("not a summary: it is not a JSON object", file)
    data = renamed(data)
    of_run = get_type_hints(Summary, include_extras=True)
    del of_run["figures"]
    here = [name for name in PER_PEER if name in data or name not in COUNTED]  # a run may be older than a counter
    if missing := {*of_run, *here} - data.keys():
        lacking = f"it lacks '{min(missing)}', or another version of gossipx has written it"
        raise UsageError(f"not a summary: {lacking}", file)
    found = {name: _read_as(kind, name, data[name], file) for name, kind in of_run.items()}
    figures = {name: _read_as(list[Number | None], name, data[name], file) for name in here}
    if wrong := [name for name, values in figures.items() if len(values) != found["peers"]]:
        raise UsageError(f"not a summary: '{wrong[0]}' is not one number or null per peer", file)
    nothing: PerPeer = [None] * found["peers"]
    return Summary(**found, figures={name: figures.get(name, nothing) for name in PER_PEER})


def _read_as(kind: Any, name: str, value: object, file: Path) -> Any:
    try:
        found = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        told = f"of another type ({error})" if name not in PER_PEER else "not one number or null per peer"
        raise UsageError(f"not a summary: '{name}' is {told}", file) from None
    return printable(found) if isinstance(found, str) else found
