"""Delayed pulls caused by a straggler: soft barrier against lazy pulls, and PSSP against SSP with equal regret bounds.

FluentPS, Figure 9 and Table IV. One of four workers takes three times as long for an iteration. It is always the same
worker, which in the end bounds all that wait for it, or each in turn, as on shared machines.
"""

from __future__ import annotations

import statistics
import time

import torch
from _bench.tables import Table
from _process_pool import SERVERS, WORKERS, Done, Job, ProcessPool, delayed_pulls, join
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


def equal_staleness(staleness: int, inverse: int) -> int:
    """Return s' from s and 1/c: SSP with s' has the regret bound of PSSP with s and c (FluentPS, section III-E.1)."""
    return staleness + inverse - 1


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


def measure(pool: ProcessPool, rounds: int, iterations: int, groups: tuple[int, ...] = GROUPS) -> Table:
    """Return the table of medians over rounds; ``groups`` are 1/c of the PSSP models."""
    title = (
        f"Per 100 iterations: DPRs of {WORKERS} workers at {SERVERS} shards (at most {100 * WORKERS * SERVERS}), and"
        f" seconds of the first {WORKERS - 1} workers and of the last; steps of {STEP * 1e3:.0f} ms asleep, one worker"
        f" {SLOWED} times as long, the last or each for {TURN} iterations; {iterations} iterations, rounds: {rounds}"
    )
    columns = (f"{name}, {pulls}" for name in ("DPRs", "s, fast", "s, last") for pulls in PULLS)
    table = Table(title, ("slow", "sync model", *columns))
    for straggler, turn in STRAGGLERS.items():
        medians = _medians(pool, rounds, iterations, groups, turn)
        reference = medians[f"SSP s={STALENESS}", "soft"]
        for name in kinds(groups):
            soft = medians[name, "soft"]
            lazy = medians.get((name, "lazy"), soft)
            shown = (f"{one[key]:{form}}" for key, form in _FORMS.items() for one in (soft, lazy))
            table.row(straggler, name, *shown)
            for pulls, one in (("soft", soft), ("lazy", lazy)):
                called = f"{straggler}: {name}, {pulls}"
                table.figure(f"{called}: DPRs per 100 iterations", one["dprs"], "", reference=reference["dprs"])
                table.figure(f"{called}: 100 iterations", one["fast"], "s", reference=reference["fast"])
        _tell_directions(table, straggler, medians, groups)
    return table


_FORMS = {"dprs": ".0f", "fast": ".2f", "slow": ".2f"}


def _medians(
    pool: ProcessPool, rounds: int, iterations: int, groups: tuple[int, ...], turn: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the medians by sync model and kind of pull; ASP, which delays no pull, has only one kind."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(rounds):
        for name, model in kinds(groups).items():
            for pulls in PULLS if model != "asp" else PULLS[:1]:
                settings = {"servers": "0,1", "servers_only": True, "sync": model, "pulls": pulls, "seed": number}
                done = pool.run(train, iterations=iterations, turn=turn, settings=settings)
                found.setdefault((name, pulls), []).append(_summed_up(done, iterations))
    return {kind: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for kind, runs in found.items()}


def _summed_up(done: list[Done], iterations: int) -> dict[str, float]:
    per_100 = 100 / iterations
    trained = [one for one in done if one["seconds"]]
    return {
        "dprs": max(one["delayed"] for one in trained) * per_100,
        "fast": statistics.fmean(one["seconds"] for one in trained[:-1]) * per_100,
        "slow": trained[-1]["seconds"] * per_100,
    }


def _tell_directions(
    table: Table, straggler: str, medians: dict[tuple[str, str], dict[str, float]], groups: tuple[int, ...]
) -> None:
    """Add figures for the paper's findings: lazy pulls and PSSP save DPRs."""

    def tell(what: str, fewer: tuple[str, str], more: tuple[str, str]) -> None:
        most = medians[more]["dprs"]
        saved = 1 - medians[fewer]["dprs"] / most if most else 0.0
        table.figure(f"{straggler}: {what}", saved, "", least=0.0, met=saved > 0)

    plain = f"SSP s={STALENESS}"
    tell(f"{plain}: DPRs that lazy saves of soft", (plain, "lazy"), (plain, "soft"))
    for inverse in groups:
        bounded = f"SSP s={equal_staleness(STALENESS, inverse)}, as bounded"
        for pulls in PULLS:
            name = f"PSSP s={STALENESS} c=1/{inverse}"
            tell(f"{name}, {pulls}: DPRs saved of SSP as bounded", (name, pulls), (bounded, pulls))


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
