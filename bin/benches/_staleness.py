"""Delayed pulls caused by a straggler: soft barrier against lazy pulls, and PSSP against SSP with equal regret bounds.

FluentPS, Figure 9 and Table IV. One of four workers takes three times as long for an iteration. It is always the same
worker, which in the end bounds all that wait for it, or each in turn, as on shared machines.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, delayed_pulls, join
from _report import figure
from _sums import equal_staleness
from torch import nn
from torch.nn import functional

STEP = 0.01
"""Seconds that an iteration sleeps, so that the number of cores has no effect."""
SLOWED = 3
"""Factor of the slow worker's time per iteration."""
STALENESS = 3
"""The staleness s of Figure 9."""
GROUPS = (2, 3, 5, 10)
"""The values 1/c of models A, C, E and G in Figure 9."""
PULLS = ("soft", "lazy")
TURN = 10
"""Number of iterations for which each worker is slow, if they take turns."""
STRAGGLERS = {"the same": 0, "each in its turn": TURN}


def kinds(groups: tuple[int, ...]) -> dict[str, str]:
    """Return sync models by row: ASP, SSP, dynamic PSSP, each PSSP, and the SSP with the same regret bound."""
    made = {
        "ASP": "asp",
        f"SSP s={STALENESS}": f"ssp:staleness={STALENESS}",
        f"PSSP s={STALENESS} α=1": f"pssp:staleness={STALENESS},alpha=1",  # Theorem 2: bounded as c = 1/2
    }
    for inverse in groups:
        other = equal_staleness(STALENESS, inverse)
        made[f"PSSP s={STALENESS} c=1/{inverse}"] = f"pssp:staleness={STALENESS},p={1 / inverse:g}"
        made[f"SSP s={other}, as bounded"] = f"ssp:staleness={other}"
    return made


def measure(pool: ProcessPool, rounds: int, iterations: int, groups: tuple[int, ...] = GROUPS) -> Any:
    """Return title, headings, rows and figures.

    Args:
        pool: processes on loopback.
        rounds: number of rounds, over which medians are taken.
        iterations: length of each run.
        groups: 1/c of the PSSP models.
    """
    rows: list[tuple[str, ...]] = []
    figures: list[Any] = []
    for straggler, turn in STRAGGLERS.items():
        medians = _medians(pool, rounds, iterations, groups, turn)
        for name in kinds(groups):
            soft = medians[name, "soft"]
            lazy = medians.get((name, "lazy"), soft)
            rows.append(
                (straggler, name, *(f"{one[key]:{form}}" for key, form in _FORMS.items() for one in (soft, lazy)))
            )
            for pulls, one in (("soft", soft), ("lazy", lazy)):
                called = f"{straggler}: {name}, {pulls}"
                reference = medians[f"SSP s={STALENESS}", "soft"]
                for key, (what, unit) in _TOLD.items():
                    figures.append(figure(f"{called}: {what}", one[key], unit, reference=reference[key]))
        figures += _directions(straggler, medians, groups)
    headings = (
        "slow",
        "sync model",
        *(f"{name}, {pulls}" for name in ("DPRs", "s, fast", "s, last") for pulls in PULLS),
    )
    title = (
        f"Per 100 iterations: DPRs of {WORKERS} workers at {SERVERS} shards (at most {100 * WORKERS * SERVERS}), and"
        f" seconds of the first {WORKERS - 1} workers and of the last; steps of {STEP * 1e3:.0f} ms asleep, one worker"
        f" {SLOWED} times as long, the last or each for {TURN} iterations; {iterations} iterations, rounds: {rounds}"
    )
    return title, headings, rows, figures


def _medians(
    pool: ProcessPool, rounds: int, iterations: int, groups: tuple[int, ...], turn: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the medians by sync model and kind of pull; ASP, which delays no pull, has only one kind."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for name, model in kinds(groups).items():
            for pulls in PULLS if model != "asp" else PULLS[:1]:
                settings = {"servers": "0,1", "servers_only": True, "sync": model, "pulls": pulls, "seed": number}
                done = pool.run("_staleness:train", iterations=iterations, turn=turn, settings=settings)
                found.setdefault((name, pulls), []).append(_summed_up(done, iterations))
    return {kind: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for kind, runs in found.items()}


_FORMS = {"dprs": ".0f", "fast": ".2f", "slow": ".2f"}
_TOLD = {"dprs": ("DPRs per 100 iterations", ""), "fast": ("100 iterations", "s")}


def _summed_up(done: list[Done], iterations: int) -> dict[str, float]:
    per_100 = 100 / iterations
    trained = [one for one in done if one["seconds"]]
    return {
        "dprs": max(one["delayed"] for one in trained) * per_100,
        "fast": statistics.fmean(one["seconds"] for one in trained[:-1]) * per_100,
        "slow": trained[-1]["seconds"] * per_100,
    }


def _directions(straggler: str, medians: dict[tuple[str, str], dict[str, float]], groups: tuple[int, ...]) -> list[Any]:
    """Return figures for the paper's findings: lazy pulls and PSSP save DPRs."""
    plain = f"SSP s={STALENESS}"
    soft, lazy = medians[plain, "soft"]["dprs"], medians[plain, "lazy"]["dprs"]
    saved = 1 - lazy / soft
    made = [{**figure(f"{straggler}: {plain}: DPRs that lazy saves of soft", saved, "", goal=0.0), "met": saved > 0}]
    for inverse in groups:
        for pulls in PULLS:
            bounded = medians[f"SSP s={equal_staleness(STALENESS, inverse)}, as bounded", pulls]["dprs"]
            name = f"PSSP s={STALENESS} c=1/{inverse}"
            saved = 1 - medians[name, pulls]["dprs"] / bounded if bounded else 0.0
            one = figure(f"{straggler}: {name}, {pulls}: DPRs saved of SSP as bounded", saved, "", goal=0.0)
            made.append({**one, "met": saved > 0})
    return made


# --- in each process ------------------------------------------------------------------------------------


def train(job: Job) -> Done:
    """Run a worker's iterations, slowly if it is the straggler; return their time, and the DPRs of all shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peer = join(job, model, optimizer)
    if peer is None:
        return {"seconds": 0.0}
    worker, turn = peer.rank - SERVERS, job["turn"]
    inputs, labels = torch.randn(32, 20), torch.randint(0, 10, (32,))
    began = time.perf_counter()
    for iteration in range(job["iterations"]):
        slow = iteration // turn % WORKERS if turn else WORKERS - 1
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        time.sleep(STEP * SLOWED if worker == slow else STEP)
        loss.backward()
        optimizer.step()
    peer.sync()  # the last pull belongs to the last iteration
    seconds = time.perf_counter() - began
    peer.finish()
    return {"seconds": seconds, "delayed": delayed_pulls(peer)}
