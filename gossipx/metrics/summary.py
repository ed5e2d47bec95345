"""The summary of a run that has finished or was stopped, ``summary.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.errors import MALFORMED, GossipxError, UsageError, printable
from gossipx.protocol.fields import MAX_COUNT
from gossipx.specs import texts

FILE = "summary.json"
Figures = list[float | None]
"""One number per peer, by rank; None for a peer that did not finish."""


@dataclass(frozen=True)
class Summary:
    """The metrics of a run. Lists have one entry per peer, by rank, None for a peer that was lost.

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
        retrievals: other peers' models mixed in while training, whichever side began the exchange.
        taken_in: models that a hub mixed into its centre.
        delayed_pulls: DPRs of the shards that this peer serves: one worker's pulls of one iteration count once per
            shard if they had to wait; None without servers.
        bytes_received: bytes on the wire while training.
        finish_bytes: bytes received in the finish.
        test_accuracy: of each peer's own model, after the finish; None where only the loss is measured.
        test_accuracy_before_finish: the same before the finish.
        test_loss: of each peer's own model, after the finish, in nats per image, or per character of text; None: it is
            not measured.
        test_loss_before_finish: the same before the finish.
        test_bits_per_character: ``test_loss`` of text in bits; None for other data.
        test_bits_per_character_before_finish: the same before the finish.
        consensus_accuracy: of the average of all final models.
        consensus_distance: each peer's estimate of Eq. 8 at the end of training.
        agreed: whether all peers that finished hold the same model, bit by bit; False also if the peers that were seen
            to end are not most of those in the finish; None: the run has no finish, so that nothing is claimed.
        lost: names of peers that did not finish.
        stopped: names of peers that were stopped before the finish, by a signal; their figures are those until then.
        wall_seconds: from the first peer's first iteration to the last peer's end.
        train_seconds: of each peer, from its first iteration to its last.
        blocked_seconds: time that gossipx blocked the training thread; None for a peer that only serves others.
        overhead_seconds: time that the training thread spent on measuring its model and recording metrics.
        skipped: decisions to exchange that came to nothing, because one was under way or no other peer was available.
        failed: exchanges begun but not completed.
        poisoned: received models refused because of NaN or Inf.
        corrupted: received frames refused because they did not match their checksums.
        strangers: connections turned away because their openers did not prove to belong to the run.
        expiry_warnings: how often a peer has warned that a certificate expires, from 14 days before on.
        suspicions: how often another peer stopped answering; most of them answer again later.
        set_back: how often a shard's server came back without all of the shard's state, as each worker saw it.
        outliers: received models that were suddenly far from the receiver's.
        unwritten: records of curves, checkpoints, changes for a server's journal and models that could not be written.
        crashes: how often each peer's process was killed; this and the next two: None in a real run.
        restarts: how often it was started again.
        lost_iterations: iterations that its killed processes had made since the checkpoint with which the next process
            began, or all, if there was none. Other peers may have mixed in models with them.
        consensus_loss: loss on test data of the average of all final models.
    """

    name: str
    policy: str
    codec: str
    seed: int
    peers: int
    task: str | None
    model: str | None
    partition: str
    iterations: int
    retrievals: Figures
    taken_in: Figures
    delayed_pulls: Figures
    bytes_received: Figures
    finish_bytes: Figures
    test_accuracy: Figures
    test_accuracy_before_finish: Figures
    consensus_accuracy: float | None
    test_loss: Figures
    test_loss_before_finish: Figures
    test_bits_per_character: Figures
    test_bits_per_character_before_finish: Figures
    consensus_loss: float | None
    consensus_distance: Figures
    agreed: bool | None
    lost: list[str]
    stopped: list[str]
    wall_seconds: float
    train_seconds: Figures
    blocked_seconds: Figures
    overhead_seconds: Figures
    skipped: Figures
    failed: Figures
    poisoned: Figures
    corrupted: Figures
    strangers: Figures
    expiry_warnings: Figures
    suspicions: Figures
    set_back: Figures
    outliers: Figures
    unwritten: Figures
    crashes: Figures
    restarts: Figures
    lost_iterations: Figures

    def of_training(self, figures: Figures) -> Figures:
        """Return the figures of the peers that train; peers that were lost are left out."""
        return [value for value, blocked in zip(figures, self.blocked_seconds, strict=True) if blocked is not None]

    def of_serving(self, figures: Figures) -> Figures:
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
            unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
            unfinished.replace(directory / FILE)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise GossipxError(f"{directory / FILE}: the summary cannot be written ({error.strerror})") from error

    def completed(self, other: Summary) -> Summary:
        """Return this summary with the figures that another one of the same run has of peers that are lost here."""
        both: dict[str, Any] = {
            name: [
                ours if theirs is None else theirs
                for ours, theirs in zip(getattr(other, name), getattr(self, name), strict=True)
            ]
            for name in PER_PEER
        }
        return dataclasses.replace(
            self,
            iterations=max(self.iterations, other.iterations),
            agreed=False if other.agreed is False else self.agreed,
            lost=[name for name in self.lost if name in other.lost],
            stopped=sorted({*self.stopped, *(name for name in other.stopped if name in self.lost)}),
            **both,
        )


PER_PEER = tuple(field.name for field in dataclasses.fields(Summary) if field.type == "Figures")
"""The fields with one entry per peer; peers' reports have a value under each of these names."""


def per_peer(reports: Sequence[Mapping[str, Any] | None]) -> dict[str, Figures]:
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
    names = {field.name for field in dataclasses.fields(Summary)}
    if not isinstance(data, dict):
        raise UsageError("not a summary: it is not a JSON object", file)
    if not names <= data.keys():
        lacking = f"it lacks '{min(names - data.keys())}', or another version of gossipx has written it"
        raise UsageError(f"not a summary: {lacking}", file)
    for field in dataclasses.fields(Summary):
        if not _fits(str(field.type), data[field.name], data["peers"]):
            raise UsageError(f"not a summary: '{field.name}' is {_WANTED[str(field.type)]}", file)
    return Summary(**{name: _printable(data[name]) for name in names})


def _printable(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


_WANTED = {
    "str": "not text",
    "str | None": "neither text nor null",
    "bool | None": "neither true, false nor null",
    "int": "not an integer",
    "float": "not a number",
    "float | None": "neither a number nor null",
    "list[str]": "not a list of names",
    "Figures": "not one number or null per peer",
}


def _fits(kind: str, value: Any, peers: int) -> bool:
    """Return whether a value from the file fits a field of type ``kind``."""
    if kind.endswith(" | None"):
        return value is None or _fits(kind.removesuffix(" | None"), value, peers)
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "list[str]":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == "Figures":
        return isinstance(value, list) and len(value) == peers and all(_fits("float | None", v, peers) for v in value)
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        return False
    return isinstance(value, float) or abs(value) <= MAX_COUNT  # integers in JSON are unbounded, and sums must fit
