"""Effect of codecs on accuracy and traffic of training (3LC, Tables 1 and 2, Figures 3 to 6).

bin/bench compression                 short runs of LeNet, some codecs, two seeds (about 5 minutes on 2 cores)
bin/bench compression --full          all codecs and the paper's designs, five seeds, ResNet-20 for Table 2 (3 hours)

    --only accuracy    Table 1, last column: accuracy after all steps, and bytes; workers and server in one process
    --only half-rate   the same for 3LC, with half the learning rate
    --only steps       Figures 3 and 5: the same after 25, 50 and 75 % of the steps
    --only ratios      Table 2: bits per value
    --only links       Table 1: seconds per step over links of 10, 100 and 1000 Mbit/s, in separate processes
    --jobs N           number of parallel runs, for runs that are not timed
    --keep FILE        results, one line per run; a run in the file is not repeated, even if the code has changed

bin/papers 3lc shows the results in runs/codecs beside the paper's.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _bench.cached_runs import CachedRuns, Job
from _bench.cli import Given, bench
from _bench.tables import Table, interval
from _cluster import RATES, WORKERS, train
from emulated import EmulatedNetwork
from emulated.runs import train as train_linked

FLOAT = "32-bit float"

PAPER = {
    FLOAT: "none",
    "8-bit int": "int8",
    "Stoch 3-value b-3-5": "stochastic3",
    "MQE 1-bit int": "onebit",
    "5% sparsification": "topk:ratio=0.05,sample=0.01",
    "2 local steps": "localsteps:k=2",
    "3LC (s=1.00)": "3lc:sparsity=1",
    "3LC (s=1.50)": "3lc:sparsity=1.5",
    "3LC (s=1.75)": "3lc:sparsity=1.75",
    "3LC (s=1.90)": "3lc:sparsity=1.9",
}
"""Designs of Table 1 by their names there."""
OTHERS = (
    "fp16",
    "bf16",
    "int8:block=256",
    "3lc:sparsity=1,residual=0.3",
    "3lc:sparsity=1.75+zstd",
    "qsgd:levels=7",
    "signsgd",
    "efsignsgd",
    "powersgd:rank=2",
    "dgc:ratio=0.01",
)
SPARSITIES = ("1", "1.5", "1.75", "1.9")
"""Sparsity multipliers of Table 2."""
SOME = ("none", "int8", "3lc:sparsity=1.75")
"""Codecs without --full."""
SHARES = (25, 50, 75)
"""Fractions of the steps, in %."""
LINK_STEPS = {"10mbit": 12, "100mbit": 40, "1000mbit": 100}
"""Links, and steps of a run: an even number, because a codec that sends every second step alternates in length."""
LINKED = "resnet20"
"""The model that is trained over links."""
kept_in = functools.cache(CachedRuns)


def runs(name: str, specs: Sequence[str], seeds: int, steps: int, judged: int = 1, slower: int = 1) -> list[Job]:
    """Return jobs for :func:`_cluster.train`, ordered by seed; the learning rate is the usual one by ``slower``."""
    rate = RATES[name] / slower
    return [
        {"model": name, "spec": spec, "seed": seed, "steps": steps, "judged": judged, "rate": rate}
        for seed in range(seeds)
        for spec in specs
    ]


def ratio_spec(sparsity: str) -> str:
    """Return the spec of 3LC for Table 2, which does not encode normalisation layers."""
    return f"3lc:sparsity={sparsity},small=1"


def codecs_of(given: Given) -> list[str]:
    """Return the codecs of the paper's designs."""
    return list(given.of(SOME, SOME, PAPER.values()))


# --- workers and a server in one process -------------------------------------------------------------------


def jobs(part: str, given: Given) -> list[Job]:
    """Return the runs of a part that is not timed."""
    own = codecs_of(given)
    seeds, steps, judged = given.of((1, 4, 1), (2, 300, 1), (5, 4000, 10))
    if part == "accuracy":
        return runs("lenet", [*own, *given.of((), (), OTHERS)], seeds, steps, judged)
    if part == "half-rate":
        ternary = [spec for spec in own if spec == "none" or spec.startswith("3lc")]
        return runs("lenet", ternary, seeds, steps, judged, slower=2)
    if part == "steps":
        return [job for share in SHARES for job in runs("lenet", own, min(seeds, 3), steps * share // 100)]
    model, ratio_steps = given.of(("lenet", 4), ("lenet", 200), ("resnet20", 1200))
    return runs(model, [ratio_spec(sparsity) for sparsity in SPARSITIES], 1, ratio_steps)


def trained(part: str, given: Given) -> Table:
    """Make the missing runs of a part, and return its table."""
    kept, wanted = kept_in(given.keep), jobs(part, given)
    kept.complete(wanted, train, 1 if given.smoke else given.jobs)
    return trained_table(part, wanted, kept)


def trained_table(part: str, wanted: Sequence[Job], kept: CachedRuns) -> Table:
    """Return means over seeds by codec and steps, and differences from training without a codec, seed by seed."""
    title = (
        f"{part}: {wanted[0]['model']}, learning rate {wanted[0]['rate']:g}, {WORKERS} workers, bsp; means over seeds,"
        " with the 95 % interval of the difference"
    )
    heads = ("codec", "steps", "accuracy %", "less none", "push, bits per value", "pull")
    table = Table(title, (*heads, "payload, times fewer", "all frames"))
    found: dict[tuple[str, int], list[Any]] = {}
    for job in wanted:
        found.setdefault((job["spec"], job["steps"]), []).append(kept[job])
    for (spec, steps), made in found.items():
        accuracy = 100 * statistics.fmean(one["accuracy"] for one in made)
        push, pull = (statistics.fmean(one["bits"][way] for one in made) for way in (0, 1))
        payload, wire = 64 / (push + pull), sum(one["whole"] for one in made) / sum(one["wire"] for one in made)
        less = ""
        if spec != "none" and (none := found.get(("none", steps))):
            each = [100 * (one["accuracy"] - of["accuracy"]) for one, of in zip(made, none, strict=True)]
            less = f"{statistics.fmean(each):+.2f} ± {interval(each):.2f}"
        bits = (f"{push:.3f}", f"{pull:.3f}", f"{payload:.1f}", f"{wire:.1f}")
        table.row(spec, steps, f"{accuracy:.2f}", less, *bits)
        table.figure(f"{part}: accuracy of {spec} after {steps} steps", accuracy, "%")
        table.figure(f"{part}: bytes of {spec}, {steps} steps: payload", payload, "times fewer")
        table.figure(f"{part}: bytes of {spec}, {steps} steps: all frames", wire, "times fewer")
    return table


# --- over emulated links, a server and workers of ``gossipx run`` on separate hosts ------------------------


def link_jobs(specs: Sequence[str], rounds: int) -> list[Job]:
    """Return the jobs: each round runs all codecs on all links in turn."""
    return [
        {"link": rate, "model": LINKED, "spec": spec, "round": number}
        for number in range(rounds)
        for rate in LINK_STEPS
        for spec in specs
    ]


def run_linked(job: Job) -> dict[str, Any]:
    """Run a job, and return ``seconds`` per step, the mean of the slowest worker."""
    codec = ("--push-codec", job["spec"], "--pull-codec", job["spec"])
    options = ("--servers", "0", "--servers-only", "--sync", "bsp", *codec, "--seed", str(job["round"]))
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(WORKERS + 1, job["link"]) as net:
        script = (Path(__file__).with_name("_scripts.py"), "timed", job["model"], str(LINK_STEPS[job["link"]]), scratch)
        train_linked(net, Path(scratch), "run", *options, *script)
        return {"seconds": max(json.loads(file.read_text()) for file in Path(scratch).glob("*.json"))}


def links(given: Given) -> Table:
    """Make the missing runs over links, and return the speedups of Table 1."""
    kept, specs, rounds = kept_in(given.keep), codecs_of(given), given.of(1, 1, 3)
    kept.complete(link_jobs(specs, rounds), run_linked, 1)
    return links_table(specs, rounds, kept)


def links_table(specs: Sequence[str], rounds: int, kept: CachedRuns) -> Table:
    """Return seconds per step by codec and link, and the speedups over no codec."""
    heads = ("codec", *(head for rate in LINK_STEPS for head in (f"{rate}, s a step", "times faster")))
    table = Table(f"{LINKED}, {WORKERS} workers and a server, bsp, links shaped by tc, medians of {rounds}", heads)
    seconds: dict[tuple[str, str], list[float]] = {}
    for job in link_jobs(specs, rounds):
        seconds.setdefault((job["spec"], job["link"]), []).append(kept[job]["seconds"])
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    for spec in specs:
        cells = []
        for rate in LINK_STEPS:
            own, none = medians[spec, rate], medians["none", rate]
            cells += [f"{own:.3f}", f"{none / own:.2f}"]
            table.figure(f"{rate}: seconds per step, {spec}", own, "s", reference=none)
            if (spec, rate) == ("3lc:sparsity=1.75", "10mbit"):
                table.figure(f"{rate}: faster by {spec}", none / own, "times", least=15)
        table.row(spec, *cells)
    return table


PARTS: dict[str, Callable[[Given], Table]] = {
    part: functools.partial(trained, part) for part in ("accuracy", "half-rate", "steps", "ratios")
}


if __name__ == "__main__":
    options = {"--jobs": {"type": int, "default": os.cpu_count() or 1}, "--keep": {"type": Path}}
    bench(__file__, __doc__, {**PARTS, "links": links}, options, smoke=("accuracy",))
