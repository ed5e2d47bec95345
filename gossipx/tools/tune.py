"""``gossipx tune``: short runs of a training with several kinds of exchange, and the choice that their figures suggest.

The figures are those of the real training over the real network, so nothing is assumed about models or links. A short
run says nothing about the final loss: the order of the candidates, from exact and frequent exchanges to fewer bytes, is
that of docs/choosing.md, and the first one that the link carries is chosen.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli_w

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.hosts import PeerLine, local_ranks
from gossipx.launch.start import check
from gossipx.metrics import curves
from gossipx.metrics.curves import Series
from gossipx.settings import files
from gossipx.settings.sections import MOST_ITERATIONS, RunConfig
from gossipx.specs import texts
from gossipx.tools.query import query

LINK_SHARE = 0.5
"""Largest share of the time between two exchanges of a peer that one may take. Above it, exchanges that are sometimes
slower would be skipped, and peers that serve others would be busy."""
LEAST_ITERATIONS = 30
"""Iterations of each peer without which a candidate has no figures."""
LONGEST_START = 300.0
"""Seconds within which all peers of this machine must train; data sets and compilers may take minutes."""
STOP = 120.0
"""Seconds that a run has to stop."""
LOOK_EVERY = 0.5
"""Seconds between two looks at the peers."""
RUN = "tune"
NO_EXCHANGE = "no model was exchanged"
SHOWN = 20
"""Last lines of a run that ended early which are shown: its error, and the end of a script's traceback."""


@dataclass(frozen=True)
class Candidate:
    """A kind of exchange to measure: a name, and settings of the table ``[sync]``."""

    name: str
    settings: dict[str, Any]

    @property
    def options(self) -> str:
        """The settings as options of ``gossipx run``."""
        return " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in self.settings.items())


CANDIDATES = (
    Candidate("pulls", {"policy": "tau:10"}),
    Candidate("pulls, 3LC", {"policy": "tau:10", "codec": "3lc:sparsity=1,residual=0.3"}),
    Candidate(
        "pairs, one bit",
        {"policy": "tau:5", "mode": "pushpull", "codec": "efsignsgd", "mixing": "choco:gamma=0.5"},
    ),
)
"""The kinds of exchange to measure, in order of preference: each needs fewer bytes than the one before, and loses
more."""


@dataclass(frozen=True)
class Measured:
    """The figures of one candidate, means over the peers of this machine.

    Attributes:
        candidate: its name.
        options: its options of ``gossipx run``.
        why: why there are no figures; then all others are 0.
        step_seconds: of one iteration, exchanges included.
        model_bytes: received per exchange.
        exchange_seconds: from the request to the last byte, median.
        blocked: share of the time that gossipx blocked the training thread.
        skipped: share of the decisions to exchange that came to nothing.
        period: iterations between two exchanges.
        delta: Δ_t (Eq. 6), the length of an iteration's step, median.
    """

    candidate: str
    options: str
    why: str = ""
    step_seconds: float = 0.0
    model_bytes: float = 0.0
    exchange_seconds: float = 0.0
    blocked: float = 0.0
    skipped: float = 0.0
    period: int = 0
    delta: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second of an exchange; 0: unknown."""
        return self.model_bytes / self.exchange_seconds if self.exchange_seconds else 0.0

    @property
    def share(self) -> float:
        """Share of the time between two exchanges that one takes."""
        return self.exchange_seconds / (self.period * self.step_seconds) if self.step_seconds else 0.0

    @property
    def least_period(self) -> int:
        """The shortest period in iterations with which exchanges take :data:`LINK_SHARE` of the time between two."""
        return math.ceil(self.exchange_seconds / (LINK_SHARE * self.step_seconds))

    @property
    def megabytes(self) -> float:
        """10⁶ bytes received per peer in 1,000 iterations."""
        return self.model_bytes / 1e6 * 1000 / self.period if self.period else 0.0

    @property
    def blocked_seconds(self) -> float:
        """Seconds that the training thread is blocked in 1,000 iterations."""
        return self.blocked * self.step_seconds * 1000


@dataclass(frozen=True)
class Tuned:
    """The result.

    Attributes:
        measured: the figures of all candidates.
        chosen: the settings of the table ``[sync]`` that are suggested.
        reason: why, in words.
        between_machines: whether peers of other machines took part; else rates are those of this machine's memory.
    """

    measured: list[Measured]
    chosen: dict[str, Any]
    reason: str
    between_machines: bool


def tune(given: RunConfig, hosts: Path, script: list[str], seconds: float, report: Callable[[str], None]) -> Tuned:
    """Measure all candidates, and choose one.

    Args:
        given: settings of the task, the machine and the exchange.
        hosts: the hosts file.
        script: a user's script and its arguments; empty: the built-in task.
        seconds: of training per candidate.
        report: receives a line per candidate.

    Raises:
        UsageError: the run would end with this error before it started.
        GossipxError: no candidate could be measured.
    """
    peers = check(given, hosts, script).peers
    here = [peers[rank] for rank in local_ranks(peers, given.exchange.advertise, hosts)]
    measured = []
    for candidate in CANDIDATES:
        report(f"measuring {candidate.name}: {candidate.options}")
        measured.append(_measure(candidate, given, peers, here, hosts, script, seconds, report))
        if measured[0].why not in ("", NO_EXCHANGE):  # the others differ only in how they exchange
            break
    if all(one.why for one in measured):
        raise GossipxError(f"nothing could be measured: {measured[0].why}")
    chosen, reason = choose(measured)
    return Tuned(measured, chosen, reason, len(here) < len(peers))


def choose(measured: Sequence[Measured]) -> tuple[dict[str, Any], str]:
    """Return the settings that the figures suggest, and the reason.

    It is the first candidate whose exchanges take at most :data:`LINK_SHARE` of the time between two of them. If none
    does, it is the one that needs the shortest period for that: where a network is slow because of its delay and not
    its rate, fewer bytes gain nothing.
    """
    known = [one for one in measured if not one.why]
    settings = {candidate.name: candidate.settings for candidate in CANDIDATES}
    shares = ", ".join(f"{one.candidate} {one.share:.0%}" for one in known)
    chosen = next((one for one in known if one.share <= LINK_SHARE), None)
    if chosen is not None:
        return dict(settings[chosen.candidate]), f"exchanges take these shares of the time between two: {shares}"
    chosen = min(known, key=lambda one: one.least_period)
    reason = f"exchanges take too much of the time between two ({shares}); of {chosen.candidate} with tau:"
    return {**settings[chosen.candidate], "policy": f"tau:{chosen.least_period}"}, (
        f"{reason}{chosen.least_period}, {LINK_SHARE:.0%} at most"
    )


# --- one candidate --------------------------------------------------------------------------------


def _measure(
    candidate: Candidate,
    given: RunConfig,
    peers: Sequence[PeerLine],
    here: Sequence[PeerLine],
    hosts: Path,
    script: list[str],
    seconds: float,
    report: Callable[[str], None],
) -> Measured:
    with tempfile.TemporaryDirectory(prefix="gossipx-tune-") as folder:
        place = Path(folder)
        settings = _settings(candidate, given, hosts, place, bool(script))
        (place / "run.toml").write_text(files.dump(settings), encoding="utf-8")
        with (place / "log").open("w+b") as log:
            command = [sys.executable, "-m", "gossipx", "run", "--config", str(place / "run.toml"), *script]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            try:
                why = _train(process, settings, peers, here, seconds)
            finally:
                _stop(process)
        if why:
            for line in (place / "log").read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]:
                report(f"  {line}")
            return Measured(candidate.name, candidate.options, why)
        found = [curves.scalars(place / RUN / f"peer-{peer.rank:02d}") for peer in here]
    return _figures(candidate, settings.decides, found)


def _settings(candidate: Candidate, given: RunConfig, hosts: Path, place: Path, has_script: bool) -> RunConfig:
    """Return the settings of a short run; what it does not need is not done, nor written."""
    run: dict[str, Any] = {
        "peers": str(hosts.absolute()),
        "logdir": str(place),
        "name": RUN,
        "log_interval": 1,
        "save_model": False,
        **({} if has_script else {"iterations": MOST_ITERATIONS, "eval_interval": 0}),
    }
    wanted = {**run, "finish": "none", **candidate.settings}
    return files.changed(given, wanted, **wanted)


def _train(
    process: subprocess.Popen[bytes],
    settings: RunConfig,
    peers: Sequence[PeerLine],
    here: Sequence[PeerLine],
    seconds: float,
) -> str:
    """Wait until all peers of this machine have trained for some time; return why that failed, empty on success."""
    until = time.monotonic() + LONGEST_START
    began: float | None = None
    while time.monotonic() < until:
        if process.poll() is not None:
            if process.returncode == 0:
                return "the run ended early: let the script train longer, or give fewer --seconds"
            return f"the run ended early, with exit code {process.returncode}: its last lines are above"
        done = [int(one.report.get("iteration", 0)) for one in query(peers, settings.exchange, "status", here)]
        if began is None and min(done) > 0:
            began = time.monotonic()
            until = began + max(seconds, LONGEST_START)
        if began is not None and time.monotonic() - began >= seconds and min(done) >= LEAST_ITERATIONS:
            return ""
        time.sleep(LOOK_EVERY)
    return f"not all peers trained {LEAST_ITERATIONS} iterations within {LONGEST_START:g} s"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()  # its peers notice, and end
            process.wait()


def _figures(candidate: Candidate, policy: str, found: Sequence[dict[str, Series]]) -> Measured:
    period = int(policy.removeprefix("tau:"))
    received = [_last(one, "comm/bytes_received") / max(_last(one, "sync/retrievals"), 1.0) for one in found]
    exchanges = [value for one in found if "comm/pull_seconds" in one for value in one["comm/pull_seconds"].values]
    if not exchanges:
        return Measured(candidate.name, candidate.options, NO_EXCHANGE)
    return Measured(
        candidate=candidate.name,
        options=candidate.options,
        step_seconds=_mean(_step_seconds(one["time/train_seconds"]) for one in found),
        model_bytes=_mean(received),
        exchange_seconds=float(median(exchanges)),
        blocked=_mean(_last(one, "time/blocked_fraction") for one in found),
        skipped=_mean(_last(one, "sync/skipped") / max(_last(one, "sync/decisions"), 1.0) for one in found),
        period=period,
        delta=_mean(float(np.median(one["sync/delta"].values)) for one in found),
    )


def _step_seconds(series: Series) -> float:
    """Return the mean time per iteration, without the first third, in which caches and connections warm up."""
    late = len(series.values) // 3
    return float((series.values[-1] - series.values[late]) / (series.iterations[-1] - series.iterations[late]))


def _last(found: dict[str, Series], tag: str) -> float:
    return float(found[tag].values[-1]) if tag in found else 0.0


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def check_target(target: Path) -> None:
    """Check that the settings can be written to ``target``, before any work is done.

    Raises:
        UsageError: they cannot.
    """
    if target.exists():
        raise UsageError("the file exists: give --write another name", target)
    texts.check_target("--write", target)


def write(tuned: Tuned, given: RunConfig, target: Path) -> None:
    """Write the chosen settings, with those that were given, to a TOML file for ``gossipx run --config``.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    settings = files.changed(given, tuned.chosen, **tuned.chosen)
    wanted = {
        table: {name: value for name, value in values.items() if name in settings.given and value is not None}
        for table, values in settings.tables.items()
    }
    text = tomli_w.dumps({table: values for table, values in wanted.items() if values})
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError("the file exists: give --write another name", target) from None
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", target) from error
