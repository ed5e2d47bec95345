"""How often a straggler makes others wait: soft barrier or lazy pulls, and PSSP beside SSP with the same regret bound.

FluentPS, Figure 9 and Table IV. One of four workers takes three times as long for an iteration, always.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from _crew import SERVERS, WORKERS, Crew, Done, Job, delayed_pulls, join
from _report import figure
from _sums import equal_staleness
from torch import nn
from torch.nn import functional

STEP = 0.01
"""Seconds of an iteration, asleep, so that cores are no part of what is measured."""
SLOWED = 3
"""Times as long that the slow worker takes."""
STALENESS = 3
"""s of Figure 9."""
GROUPS = (2, 3, 5, 10)
"""1/c of its models A, C, E and G."""
PULLS = ("soft", "lazy")


def kinds(groups: tuple[int, ...]) -> dict[str, str]:
    """Sync models by the name of their row: ASP, SSP, then each PSSP and the SSP with its regret bound."""
    made = {"ASP": "asp", f"SSP s={STALENESS}": f"ssp:staleness={STALENESS}"}
    for inverse in groups:
        other = equal_staleness(STALENESS, inverse)
        made[f"PSSP s={STALENESS} c=1/{inverse}"] = f"pssp:staleness={STALENESS},p={1 / inverse:g}"
        made[f"SSP s={other}, as bounded"] = f"ssp:staleness={other}"
    return made


def measure(crew: Crew, rounds: int, iterations: int, groups: tuple[int, ...] = GROUPS) -> Any:
    """Title, headings, rows and figures.

    Args:
        crew: on loopback.
        rounds: medians are over.
        iterations: of each run.
        groups: 1/c of the PSSP models.
    """
    found: dict[tuple[str, str], list[Done]] = {}
    for number in range(rounds):
        for name, model in kinds(groups).items():
            for pulls in PULLS if model != "asp" else PULLS[:1]:
                settings = {"servers": "0,1", "servers_only": True, "sync": model, "pulls": pulls, "seed": number}
                done = crew.run("_staleness:train", iterations=iterations, settings=settings)
                found.setdefault((name, pulls), []).append(_summed_up(done, iterations))
    rows, figures = [], []
    medians = {
        kind: {figure: statistics.median(one[figure] for one in runs) for figure in runs[0]}
        for kind, runs in found.items()
    }
    for name in kinds(groups):
        soft = medians[name, "soft"]
        lazy = medians.get((name, "lazy"), soft)
        shown = [f"{one[key]:{form}}" for key, form in _FORMS.items() for one in (soft, lazy)]
        rows.append((name, *shown))
        for pulls, one in (("soft", soft), ("lazy", lazy)):
            reference = medians[f"SSP s={STALENESS}", "soft"]["dprs"]
            figures.append(figure(f"{name}, {pulls}: DPRs per 100 iterations", one["dprs"], "", reference=reference))
            figures.append(figure(f"{name}, {pulls}: 100 iterations, fast workers", one["fast"], "s"))
    figures += _directions(medians, groups)
    headings = ("sync model", *(f"{name}, {pulls}" for name in ("DPRs", "s, fast", "s, slow") for pulls in PULLS))
    title = (
        f"Per 100 iterations: DPRs of {WORKERS} workers at {SERVERS} shards (at most {100 * WORKERS * SERVERS}), and"
        f" seconds; steps of {STEP * 1e3:.0f} ms asleep, one worker {SLOWED} times as long;"
        f" {iterations} iterations, rounds: {rounds}"
    )
    return title, headings, rows, figures


_FORMS = {"dprs": ".0f", "fast": ".2f", "slow": ".2f"}


def _summed_up(done: list[Done], iterations: int) -> dict[str, float]:
    per_100 = 100 / iterations
    trained = [one for one in done if one["seconds"]]
    return {
        "dprs": max(one["delayed"] for one in trained) * per_100,
        "fast": statistics.fmean(one["seconds"] for one in trained[:-1]) * per_100,
        "slow": trained[-1]["seconds"] * per_100,
    }


def _directions(medians: dict[tuple[str, str], dict[str, float]], groups: tuple[int, ...]) -> list[Any]:
    """Whether what the paper finds holds: lazy pulls and PSSP save DPRs."""
    plain = f"SSP s={STALENESS}"
    soft, lazy = medians[plain, "soft"]["dprs"], medians[plain, "lazy"]["dprs"]
    saved = 1 - lazy / soft
    made = [{**figure(f"{plain}: DPRs that lazy saves of soft", saved, "", goal=0.0), "met": saved > 0}]
    for inverse in groups:
        for pulls in PULLS:
            bounded = medians[f"SSP s={equal_staleness(STALENESS, inverse)}, as bounded", pulls]["dprs"]
            name = f"PSSP s={STALENESS} c=1/{inverse}"
            saved = 1 - medians[name, pulls]["dprs"] / bounded if bounded else 0.0
            one = figure(f"{name}, {pulls}: DPRs saved of SSP as bounded", saved, "", goal=0.0)
            made.append({**one, "met": saved > 0})
    return made


# --- in each process ------------------------------------------------------------------------------------


def train(job: Job) -> Done:
    """A worker's iterations, the last one's slower; how long they took, and DPRs of all shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peer = join(job, model, optimizer)
    if peer is None:
        return {"seconds": 0.0}
    slowed = SLOWED if peer.rank == peer.size - 1 else 1
    inputs, labels = torch.randn(32, 20), torch.randint(0, 10, (32,))
    began = time.perf_counter()
    for _ in range(job["iterations"]):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), labels)
        time.sleep(STEP * slowed)
        loss.backward()
        optimizer.step()
    peer.sync()  # the last pull is a part of the last iteration
    seconds = time.perf_counter() - began
    peer.finish()
    return {"seconds": seconds, "delayed": delayed_pulls(peer)}
