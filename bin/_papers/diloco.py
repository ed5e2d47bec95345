"""Loss against bytes of GASLoC and DiLoCo in virtual time, beside our figures of real runs.

bin/papers diloco           LeNet on classes that are split unevenly, 4 peers; bytes of 8; 60 iterations
bin/papers diloco --full    the transformer on text: 4 peers with 800 iterations, 16 with 400, 64 with 200 (two hours)

DiLoCo is blocking waves with Nesterov's momentum, without a coordinator; GASLoC is pulls or pairs with momentum. Links
are equal, or those of half of the peers are ten times slower. The loss is that of the average of all models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _bench.cli import Given
from _bench.simulated import Run, mean, run
from _table import Part, show
from published import Figure, read

paper = read("diloco")
COMPUTE = 0.075
"""Seconds of an iteration: the transformer's on half of a core, as in the real runs."""
NESTEROV, MOMENTUM = "nesterov:lr=0.7,momentum=0.9", "momentum:0.6"
SYSTEMS: dict[str, dict[str, Any]] = {
    "diloco": {"exchange": "waves", "outer": NESTEROV, "blocking": True},
    "waves": {"exchange": "waves", "blocking": True},
    "momentum": {"outer": MOMENTUM},
    "pairs": {"mode": "pushpull", "outer": MOMENTUM},
    "pull": {},
    "never": {"policy": "never"},
}
NESTEROV_SAVES = "waves: loss that Nesterov saves"
TOLD = {
    "diloco": "DiLoCo: waves, Nesterov",
    "waves": "waves without momentum",
    "momentum": "GASLoC: pulls, momentum",
    "pairs": "GASLoC: pairs, momentum",
    "pull": "pulls without momentum",
    "never": "no communication",
}
SLOW = {"slow_share": 0.5, "slow_factor": 10.0}
Kind = tuple[str, int]
"""A system and its period in iterations."""


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    full, rare = given.full, given.of(10, 20, 50)
    kinds: list[Kind] = [*((system, rare) for system in SYSTEMS), ("pull", 10)]
    lengths = given.of({4: 10}, {4: 60, 8: 60}, {4: 800, 16: 400, 64: 200})
    more: list[Kind] = [("diloco", 10), ("diloco", 20), ("waves", 10)] if full else []
    counted = [kind for kind in kinds if full or kind[0] in ("diloco", "momentum", "pairs")]
    found = {
        size: {kind: _run(kind, size, steps, full) for kind in ((*kinds, *more) if size == 4 else counted)}
        for size, steps in lengths.items()
    }
    for size, runs in found.items():
        if full or size == 4:
            yield _loss(size, lengths[size], runs, full)
    if given.smoke:
        return
    yield _bytes(found, rare, lengths)
    middle = list(lengths)[1]
    slow = {
        kind: _run(kind, middle, lengths[middle], full, **SLOW) for kind in kinds if kind[0] in ("diloco", "momentum")
    }
    yield _links(found[middle], slow, middle, "1 Gbit/s" if full else "100 Mbit/s")


def _run(kind: Kind, size: int, steps: int, full: bool, **network: float) -> Run:
    system, period = kind
    text = {"task": "text", "model": "transformer"}
    tables = {
        "simulation": {"peers": size},
        "run": {"iterations": steps, "eval_interval": 0},
        "task": text if full else {"partition": "dirichlet:alpha=0.3"},
        "sync": {"policy": f"tau:{period}", "finish": "none", **SYSTEMS[system]},
        "compute": {"seconds": COMPUTE},
        "network": {"preset": "1gbit" if full and not network else "100mbit", **network},
    }
    return run(tables)


def _name(kind: Kind) -> str:
    return TOLD["never"] if kind[0] == "never" else f"{TOLD[kind[0]]}, every {kind[1]}"


def _megabytes(of: Run) -> float:
    return mean(of.summary.bytes_received) / 1e6


def _loss_of(of: Run) -> float:
    assert of.summary.consensus_loss is not None
    return of.summary.consensus_loss


def _loss(size: int, steps: int, runs: dict[Kind, Run], full: bool) -> Part:
    task = "the transformer on text" if full else "LeNet on Fashion-MNIST, dirichlet:alpha=0.3"
    other = "" if full else ", and 50 iterations between exchanges in place of 20"
    setting = f"{task}, {steps} iterations, one seed, {COMPUTE} s each; real: 800 of the transformer on text{other}"
    made = Part(f"Loss against bytes, {size} peers", setting)
    for kind, one in runs.items():
        system, period = kind
        row = f"{system}:{period if full or period == 10 else 50}"
        published: dict[str, Figure | str] = {
            column: paper.figures.get(f"text/{row}/{column}", "not measured") if size == 4 else "4 peers only"
            for column in ("loss", "bytes")
        }
        loss = _loss_of(one)
        known, moved = (one if full else str(one) for one in published.values())  # the fast setting has another task
        made.add(f"{size} peers, {_name(kind)}: loss", known, loss, "nats")
        made.add(f"{size} peers, {_name(kind)}: bytes", moved, _megabytes(one), "MB per peer")
    rare = next(iter(runs))[1]
    if full and size == 4:
        for column, unit in (("loss", "nats"), ("bytes", "MB per peer")):
            ours = _loss_of(runs["diloco", rare]) if column == "loss" else _megabytes(runs["diloco", rare])
            made.add(f"DiLoCo of torchft, beside ours: {column}", paper[f"text/torchft:50/{column}"], ours, unit)
    alone = mean(runs["never", rare].summary.test_loss_before_finish)
    own = paper["text/never:own/loss"]
    known = "4 peers only" if size != 4 else own if full else str(own)
    made.add(f"{size} peers, {TOLD['never']}: loss of the peers' own models", known, alone, "nats")
    claim, better = paper["period"], _loss_of(runs["pull", rare]) - _loss_of(runs["pull", 10])
    made.add(f"{size} peers, pulls every {rare} − every 10: loss", claim, better, "nats", better > 0)
    losses = [_loss_of(runs[system, rare]) for system in SYSTEMS if system != "never"]
    apart = max(losses) - min(losses)
    made.add(f"{size} peers, every {rare}: from the least loss to the most", claim, apart, "nats", apart < better)
    for what, own, other in (
        ("pulls: loss that momentum saves", "momentum", "pull"),
        (NESTEROV_SAVES, "diloco", "waves"),
    ):
        gained = _loss_of(runs[other, rare]) - _loss_of(runs[own, rare])
        saved = paper[f"text/{other}:50/loss"].value - paper[f"text/{own}:50/loss"].value
        real = Figure("", saved, "nats", "text, 4 peers")
        made.add(f"{size} peers, {what}", real if full else str(real), gained, "nats")
    return made


def _bytes(found: dict[int, dict[Kind, Run]], rare: int, lengths: dict[int, int]) -> Part:
    setting = f"exchanges every {rare} iterations, of which the last pull has no time left; theory in place of a paper"
    made = Part("Bytes of an exchange against peers", setting)
    for size in list(found)[1:]:
        for system in ("diloco", "momentum", "pairs"):
            left = 0 if system == "diloco" else rare
            each = [_megabytes(found[one][system, rare]) / (lengths[one] - left) for one in (size, 4)]
            rounds = (size.bit_length() - 1) / 2 if system == "diloco" else 1.0
            ring = (1 - 1 / size) / (1 - 1 / 4)
            told = f"log2 of the peers (a ring all-reduce: {ring:.2f})" if system == "diloco" else "constant"
            grows = each[0] / each[1]
            near = abs(grows / rounds - 1) < 0.1
            holds = system != "pairs"
            what = f"{TOLD[system]}: {size} peers / 4"
            made.add(what, f"{rounds:g}: {told}", grows, "times the bytes per peer", near, holds)
    equal = _megabytes(found[4]["diloco", rare]) / _megabytes(found[4]["momentum", rare])
    figures = paper.figures
    known = figures["text/diloco:50/bytes"].value / figures["text/momentum:50/bytes"].value
    made.add("DiLoCo / GASLoC with pulls, 4 peers", f"{known:.2f} times on text", equal, "times", equal > 1.5, True)
    return made


def _links(equal: dict[Kind, Run], slow: dict[Kind, Run], size: int, rate: str) -> Part:
    setting = (
        f"{size} peers, one seed; 10 Mbit/s for half of the peers and 100 Mbit/s for the others, where a round "
        f"of a wave waits for the slowest; equal links have {rate}"
    )
    made = Part("Heterogeneous links", setting)
    longer = {}
    for kind, one in slow.items():
        longer[kind[0]] = one.seconds / (one.summary.iterations * COMPUTE)
        made.add(f"{_name(kind)}: time", "not measured", longer[kind[0]], "times that of computing")
        change = _loss_of(one) - _loss_of(equal[kind])
        made.add(f"{_name(kind)}: loss, less that on equal links", "not measured", change, "nats")
    claim = paper["overlap"]
    costs = longer["diloco"] > longer["momentum"]
    made.add("time of DiLoCo, which blocks, / GASLoC", claim, longer["diloco"] / longer["momentum"], "", costs)
    free = longer["momentum"] < 1.02
    made.add("pulls cost no time on slow links", claim, longer["momentum"], "times that of computing", free, holds=True)
    return made


if __name__ == "__main__":
    show(paper, parts, __doc__, data_dir=False)
