"""Runs of the built-in task with different options, one row of a table each, compared with the first row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from _bench.tables import Table, interval, known

from gossipx.metrics.summary import Summary

Result = dict[str, float]
PEERS = 4


def result_of(summary: Summary, figure: str = "accuracy") -> Result:
    """Return what a run has cost and reached.

    These are the number of ``models`` that a peer mixed, the ``bytes`` of each on the wire, the share of the time for
    which training was ``blocked``, the ``seconds`` of training, and the accuracy or loss: of the peers' ``own`` models
    before the finish and ``after`` it, and of the ``averaged`` model.
    """
    pulled, trained = sum(known(summary.retrievals)), known(summary.train_seconds)
    return {
        "models": pulled / len(summary.retrievals),
        "bytes": sum(known(summary.bytes_received)) / max(pulled, 1),
        "blocked": sum(known(summary.blocked_seconds)) / sum(trained),
        "seconds": max(trained),
        "own": fmean(known(getattr(summary, f"test_{figure}_before_finish"))),
        "after": fmean(known(getattr(summary, f"test_{figure}"))),
        "averaged": getattr(summary, f"consensus_{figure}") or 0.0,
    }


def table_of(
    title: str,
    where: str,
    rows: Mapping[str, Sequence[Result]],
    judged: str,
    goals: Mapping[str, tuple[float | None, float]],
    figure: str = "accuracy",
) -> Table:
    """Return the table of rows, whose results are in the order of the seeds.

    Args:
        title: of the table.
        where: names its figures.
        rows: the results; older ones may lack some values.
        judged: the value of a result that is compared with that of the first row, seed by seed.
        goals: by row, the least share of models saved, if it has one, and the most accuracy lost.
        figure: ``accuracy`` or ``loss``.
    """
    first, sign = next(iter(rows)), -1 if figure == "loss" else 1
    costs = ("", "models", "saved", "MB", "kB a model", "fewer", "blocked", "s")
    title = f"{title}; models and MB per peer, {figure} of own models before and after the finish, and of the average"
    table = Table(title, (*costs, "own, before", "after", "average", f"worse than {first}"))
    base = _means(rows[first])
    for name, runs in rows.items():
        one = _means(runs)
        worse = [sign * (other[judged] - own[judged]) for own, other in zip(runs, rows[first], strict=True)]
        lost, half = fmean(worse), f" ± {interval(worse):.4f}" if len(worse) > 1 else ""
        saved, fewer = 1 - one["models"] / max(base["models"], 1), base["bytes"] / max(one["bytes"], 1)
        moved = (f"{one['models'] * one['bytes'] / 1e6:.1f}", f"{one['bytes'] / 1e3:.1f}", f"{fewer:.1f}")
        times = (f"{one['blocked']:.2%}", f"{one['seconds']:.1f}") if "blocked" in one else ("", "")
        reached = (f"{one[key]:.4f}" if key in one else "" for key in ("own", "after", "averaged"))
        table.row(name, f"{one['models']:.1f}", f"{saved:.1%}", *moved, *times, *reached, f"{lost:+.4f}{half}")
        least, most = goals.get(name, (None, None))
        table.figure(f"{where}, {name}: models per peer", one["models"], "", reference=base["models"])
        table.figure(f"{where}, {name}: models saved", saved, f"of {first}'s", least=least)
        table.figure(f"{where}, {name}: bytes per model", one["bytes"], "bytes", reference=base["bytes"])
        table.figure(f"{where}, {name}: {figure} worse", lost, f"than {first}", most=most)
        if "blocked" in one:
            table.figure(f"{where}, {name}: blocked", one["blocked"], "of the time")
    return table


def _means(runs: Sequence[Result]) -> Result:
    return {key: fmean(one[key] for one in runs) for key in runs[0]}
