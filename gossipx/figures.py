"""The figures of a run, each declared once.

``summary.json``, ``gossipx compare``, ``gossipx status``, Prometheus, the curves of a run and the tables of the
documentation read these declarations. A new counter is one line of :data:`FIGURES`, and the line that counts it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class Combine(enum.Enum):
    """How ``gossipx compare`` makes one number of a run's figures; several seeds have the mean of these numbers."""

    MEAN = "mean over the peers that train"
    SERVING = "mean over the peers that only serve others"
    LOWEST = "lowest of the peers that train"
    HIGHEST = "highest of the peers that train"
    SHARE = "mean over the peers of its share of train_seconds"
    TOTAL = "sum over the peers"
    RUN = "of the whole run"
    COUNT = "sum over the peers and the seeds; a line only if it is not 0"
    SEEN = "highest of the peers, summed over the seeds; a line only if it is not 0"


@dataclass(frozen=True)
class ComparedLine:
    """A line of ``gossipx compare``.

    Attributes:
        key: of its value in ``--json``.
        heading: in the table.
        combine: how it is computed of the peers' figures.
        form: of its value.
        factor: by which the figures are multiplied.
    """

    key: str
    heading: str
    combine: Combine = Combine.MEAN
    form: str = ".1f"
    factor: float = 1.0


@dataclass(frozen=True)
class Where:
    """Where a figure is shown.

    Attributes:
        summary: whether ``summary.json`` has one number per peer under its name, from their reports.
        column: heading in the tables of peers of ``gossipx compare --html``; empty: it has no column.
        lines: of ``gossipx compare``.
        prometheus: name without ``gossipx_``, of the value that the status of a peer has under the figure's name.
        gauge: whether Prometheus takes it as a gauge; else it is a counter.
        counted: whether a running peer counts it by :class:`Counters`.
        tag: of its curve.
        by: who records the curve.
        whole: whether the curves of the whole run have its mean, and which value of the peers is the worst.
        was: its name in files of earlier versions.
    """

    summary: bool = False
    column: str = ""
    lines: tuple[ComparedLine, ...] = ()
    prometheus: str = ""
    gauge: bool = False
    counted: bool = False
    tag: str = ""
    by: str = "peers that train"
    whole: Literal["", "mean", "lowest", "highest"] = ""
    was: str = ""


@dataclass(frozen=True)
class Figure:
    """One figure. ``help`` explains it to users in one phrase; ``unit`` is empty for plain numbers."""

    name: str
    unit: str
    help: str
    where: Where


_MB = 1e-6
_ELSEWHERE = Where()


def _peer(name: str, unit: str, help: str, *lines: ComparedLine, where: Where = _ELSEWHERE) -> Figure:
    """Return a figure that peers report at the end of a run."""
    return Figure(name, unit, help, dataclasses.replace(where, summary=True, lines=lines))


def _run(name: str, unit: str, help: str, line: ComparedLine) -> Figure:
    """Return a figure of the whole run, a field of its summary."""
    return Figure(name, unit, help, Where(lines=(line,)))


def _live(name: str, unit: str, help: str, prometheus: str, gauge: bool = False) -> Figure:
    """Return a figure that only a running peer has."""
    return Figure(name, unit, help, Where(prometheus=prometheus, gauge=gauge))


def _curve(
    tag: str,
    unit: str,
    help: str,
    by: str = "peers that train",
    whole: Literal["", "mean", "lowest", "highest"] = "",
) -> Figure:
    """Return a figure that only curves have."""
    return Figure(tag, unit, help, Where(tag=tag, by=by, whole=whole))


def _of_shards(name: str, help: str, by: str = "the peer that holds the shard") -> Figure:
    """Return a figure of each shard of a parameter server; the last two digits of its tag are the shard's number."""
    return _curve(f"server/{name}/shard-00", "", help, by)


def _events(name: str, heading: str, help: str, combine: Combine = Combine.COUNT, where: Where = _ELSEWHERE) -> Figure:
    """Return a number of events that somebody should look at."""
    return _peer(name, "", help, ComparedLine(name, heading, combine, ".0f"), where=where)


def _counted(
    name: str, heading: str, help: str, combine: Combine = Combine.COUNT, prometheus: str = "", was: str = ""
) -> Figure:
    """Return a number of events that a running peer counts by :class:`Counters`."""
    return _events(name, heading, help, combine, Where(counted=True, prometheus=prometheus or name, was=was))


FIGURES = (
    _peer(
        "retrievals",
        "models",
        "models of other peers mixed in while training, whichever side began the exchange",
        ComparedLine("retrievals", "retrievals per peer"),
        where=Where(column="retrievals", prometheus="retrievals", tag="sync/retrievals", by="peers", whole="mean"),
    ),
    _peer(
        "skipped",
        "",
        "decisions to exchange that came to nothing, because one was under way or no other peer was available",
        ComparedLine("skipped", "skipped per peer"),
        where=Where(column="skipped", prometheus="skipped", tag="sync/skipped"),
    ),
    _peer(
        "failed",
        "",
        "exchanges begun but not completed",
        ComparedLine("failed", "failed per peer"),
        where=Where(column="failed", prometheus="failed", tag="sync/failed"),
    ),
    _peer(
        "merged_by_hub",
        "models",
        "models that a hub mixed into its centre; of a server, gradients that its shards took in",
        where=Where(was="taken_in"),
    ),
    _peer(
        "delayed_pulls",
        "",
        "delayed pulls (DPRs) of the shards that this peer serves: one worker's pulls of one iteration count once per"
        " shard if they had to wait; null without servers",
        ComparedLine("delayed_pulls", "delayed pulls (DPRs)", Combine.TOTAL, ".0f"),
    ),
    _peer(
        "bytes_received",
        "bytes",
        "bytes on the wire while training",
        ComparedLine("received_mb", "MB received per peer", factor=_MB),
        ComparedLine("serving_mb", "MB per serving peer", Combine.SERVING, factor=_MB),
        where=Where(column="MB received", tag="comm/bytes_received", by="all", whole="highest"),
    ),
    _peer(
        "finish_bytes",
        "bytes",
        "bytes received in the finish",
        ComparedLine("finish_mb", "MB in the finish", form=".2f", factor=_MB),
    ),
    _peer(
        "test_accuracy",
        "share",
        "accuracy of each peer's own model after the finish; null where only the loss is measured",
        ComparedLine("accuracy", "accuracy, mean", form=".4f"),
        ComparedLine("accuracy_worst", "accuracy, worst peer", Combine.LOWEST, ".4f"),
        where=Where(column="accuracy", tag="test/accuracy_after_finish"),
    ),
    _peer(
        "test_accuracy_before_finish",
        "share",
        "accuracy before the finish",
        ComparedLine("accuracy_before_finish", "accuracy before finish", form=".4f"),
        where=Where(column="accuracy before finish", tag="test/accuracy", whole="lowest"),
    ),
    _run(
        "consensus_accuracy",
        "share",
        "accuracy of the average of all final models",
        ComparedLine("accuracy_averaged", "averaged model", Combine.RUN, ".4f"),
    ),
    _peer(
        "test_loss",
        "nats",
        "loss of each peer's own model after the finish, per image or character; null: it is not measured",
        ComparedLine("loss", "loss, mean", form=".4f"),
        ComparedLine("loss_worst", "loss, worst peer", Combine.HIGHEST, ".4f"),
        where=Where(column="loss", tag="test/loss_after_finish"),
    ),
    _peer(
        "test_loss_before_finish",
        "nats",
        "loss before the finish",
        ComparedLine("loss_before_finish", "loss before finish", form=".4f"),
        where=Where(column="loss before finish", tag="test/loss", whole="highest"),
    ),
    _run(
        "consensus_loss",
        "nats",
        "loss of the average of all final models",
        ComparedLine("loss_averaged", "loss of averaged model", Combine.RUN, ".4f"),
    ),
    _peer(
        "test_bits_per_character",
        "bits",
        "test_loss of text in bits; null for other data",
        ComparedLine("bits_per_character", "bits per character, mean", form=".4f"),
        where=Where(tag="test/bits_per_character_after_finish"),
    ),
    _peer(
        "test_bits_per_character_before_finish",
        "bits",
        "the same before the finish",
        where=Where(tag="test/bits_per_character", whole="highest"),
    ),
    _peer("consensus_distance", "", "the peer's estimate of Eq. 8 at the end of training"),
    _peer(
        "train_seconds",
        "s",
        "seconds from the peer's first iteration to its last",
        ComparedLine("train_seconds", "training, s", Combine.HIGHEST),
        where=Where(column="training, s", tag="time/train_seconds"),
    ),
    _run(
        "wall_seconds",
        "s",
        "seconds from the first peer's first iteration to the last peer's end",
        ComparedLine("wall_seconds", "wall time, s", Combine.RUN),
    ),
    _peer(
        "blocked_seconds",
        "s",
        "seconds that gossipx blocked the training thread; null for a peer that only serves others",
        ComparedLine("blocked", "time blocked", Combine.SHARE, ".2%"),
        where=Where(column="blocked, s", prometheus="blocked_seconds"),
    ),
    _peer(
        "overhead_seconds", "s", "seconds that the training thread spent on measuring its model and recording figures"
    ),
    _counted("poisoned", "models refused", "received models with NaN or Inf", prometheus="poisoned_models"),
    _counted(
        "corrupted",
        "frames refused",
        "received frames that did not match their checksums",
        prometheus="corrupted_frames",
    ),
    _counted(
        "references",
        "references fetched",
        "references of waves that were fetched whole, as the peer had none or had missed a wave",
    ),
    _counted("strangers", "strangers", "connections turned away that did not prove to belong to the run"),
    _counted("expiry_warnings", "expiry warnings", "warnings that a certificate expires, from 14 days before on"),
    _counted("suspicions", "suspicions", "how often another peer stopped answering; most of them answer again later"),
    _counted(
        "shard_rollbacks",
        "shards set back",
        "how often a shard's server came back without all of the shard's state, as each worker saw it",
        Combine.SEEN,
        was="set_back",
    ),
    _counted(
        "busy_answers",
        "pulls answered Busy",
        "pulls answered with Busy: no place was free, an older model was still under way, or another peer was first",
    ),
    _counted("outliers", "models far off", "received models that were suddenly far from the receiver's"),
    _events(
        "unwritten",
        "not written to disk",
        "records of curves, checkpoints, changes for a server's journal and models that could not be written",
    ),
    _events("crashes", "crashes", "how often the peer's process was killed; null in a real run"),
    _events("restarts", "restarts", "how often it was started again; null in a real run"),
    _events(
        "lost_iterations",
        "lost iterations",
        "iterations that its killed processes had made since the checkpoint with which the next one began, or all, if"
        " there was none; null in a real run",
    ),
    _live("iteration", "", "iterations done", "iterations"),
    _live("bytes_received", "bytes", "bytes received from other peers by this process", "received_bytes"),
    _live("bytes_sent", "bytes", "bytes sent to other peers by this process", "sent_bytes"),
    _live("seconds", "s", "seconds of training", "training_seconds"),
    _live("loss", "", "last loss on training data", "loss", gauge=True),
    _live("accuracy", "share", "last accuracy on test data", "accuracy", gauge=True),
    _live(
        "last_exchange_seconds",
        "s",
        "seconds since a model was last exchanged",
        "last_exchange_age_seconds",
        gauge=True,
    ),
    _live("waiting", "", "1 while gossipx blocks the training thread, else 0", "waiting", gauge=True),
    _live("suspects", "peers", "peers that have not answered since a request failed", "peers_suspected", gauge=True),
    _live("lost", "peers", "peers that are considered dead", "peers_lost", gauge=True),
    _live("left", "peers", "peers that have left the run in order", "peers_left", gauge=True),
    _curve("train/loss", "", "loss of the batch; with the Trainer, of its updates since the last record", whole="mean"),
    _curve("sync/delta", "", "Δ_t, as the policy saw it"),
    _curve("sync/delta_difference", "", "how far Δ_t is from Δ_r, as the policy saw it"),
    _curve("sync/travelled", "", "distance travelled since the last retrieval, as the policy saw it"),
    _curve(
        "sync/decisions",
        "",
        "how often the policy has decided to exchange: completed, skipped or failed exchanges, or one under way",
    ),
    _curve(
        "sync/consensus_distance",
        "",
        "distance from the mean model (Eq. 8), estimated from the retrieved models; not in waves with a codec",
        by="peers",
        whole="mean",
    ),
    _curve(
        "sync/exact_consensus_distance",
        "",
        "distance from the mean model (Eq. 8), computed of all models",
        by="peers of a simulation",
    ),
    _curve(
        "retrieval/delta",
        "",
        "by number of the retrieval (Figure 3): the deltas since the request before, added up",
        by="peers",
    ),
    _curve(
        "retrieval/distance",
        "",
        "by number of the retrieval (Figure 4): the distance from the mean model, estimated from this retrieval",
        by="peers",
    ),
    _curve("comm/pull_seconds", "s", "duration of a retrieval", by="peers"),
    _curve("comm/staleness", "iterations", "iterations of this peer minus those of the received model", by="peers"),
    _curve(
        "time/blocked_fraction",
        "share",
        "share of time in which gossipx blocked the training thread",
        whole="highest",
    ),
    _curve(
        "time/tables_fraction",
        "share",
        "share of time in which training waited for tables; part of time/blocked_fraction",
        by="workers",
    ),
    _curve(
        "sync/elastic_distance",
        "",
        "distance of model and centre, ‖x − x̃‖, before each exchange",
        by="workers",
    ),
    _curve("hub/exchanges", "models", "models of workers that the centre has received", by="the hub"),
    _of_shards("clock", "ticks of its clock"),
    _of_shards("delayed_pulls", "delayed pulls (DPRs)"),
    _of_shards("gradients", "gradients of all its tables that it has received"),
    _of_shards(
        "staleness",
        "its optimizer steps from a worker's pull to the step that applies its gradient; mean since the last record",
    ),
    _of_shards("buffered", "gradients in its buffer", "the same, with `hybrid` or `--apply tick`"),
    _of_shards("threshold", "K, the number of gradients at which the buffer is applied", "the same, with `hybrid`"),
)
"""All figures, in the order in which they are shown. One that is shown in two places in different meanings is two."""

PER_PEER = tuple(figure.name for figure in FIGURES if figure.where.summary)
"""The figures with one number per peer; peers' reports have a value under each of these names."""
COUNTED = tuple(figure.name for figure in FIGURES if figure.where.counted)
"""The figures that :class:`Counters` have."""
LINES = tuple((figure, line) for figure in FIGURES for line in figure.where.lines)
"""The lines of ``gossipx compare``, each with its figure."""
TAGS = {figure.name: figure.where.tag for figure in FIGURES if figure.where.summary and figure.where.tag}
"""By name, the tags of the curves that end with figures of peers."""
_EARLIER_NAMES = {figure.where.was: figure.name for figure in FIGURES if figure.where.was}


class Counters(dict[str, int]):
    """The counters of one peer, by name.

    Each name has one owner, which counts under a lock of its own or on one thread.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(COUNTED, 0))

    def add(self, name: str, times: int = 1) -> None:
        """Count events of a declared figure; another name is a KeyError."""
        self[name] += times


def renamed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures of a file by their present names, where an earlier version has written it."""
    return {_EARLIER_NAMES.get(name, name): value for name, value in found.items()}
