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
    --plots FOLDER     Figures 3 to 6, from completed runs
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
    "randomk:ratio=0.05",
    "qsgd:levels=7",
    "signsgd",
    "efsignsgd",
    "powersgd:rank=2",
    "dgc:ratio=0.01",
)
ASKED = ("3LC (s=1.00)", "3LC (s=1.50)", "3LC (s=1.75)")
"""Designs whose accuracy must be within 0.3 points of float, or whose interval must include it."""
WIDE = 1.0
"""Maximum half width of a meaningful interval, in points."""
TERNARY = {"1": 39.4, "1.5": 70.9, "1.75": 107.0, "1.9": 160.0}
"""Table 2: compression ratios by sparsity multiplier."""
SOME = (FLOAT, "8-bit int", "3LC (s=1.75)")
"""Designs without --full."""
SHARES = (25, 50, 75)
"""Fractions of the steps, in %."""
LINK_STEPS = {"10mbit": 12, "100mbit": 40, "1000mbit": 100}
"""Links, and steps of a run: an even number, because a codec that sends every second step alternates in length."""
LINKED = "resnet20"
"""The model that is trained over links."""


def runs(name: str, specs: Sequence[str], seeds: int, steps: int, judged: int = 1, slower: int = 1) -> list[Job]:
    """Return jobs for :func:`_cluster.train`, ordered by seed; the learning rate is the usual one by ``slower``."""
    rate = RATES[name] / slower
    return [
        {"model": name, "spec": spec, "seed": seed, "steps": steps, "judged": judged, "rate": rate}
        for seed in range(seeds)
        for spec in specs
    ]


class Plan:
    """The plan of a short or full benchmark, or of its smoke form."""

    def __init__(self, full: bool, smoke: bool = False):
        self.designs = dict(PAPER) if full else {name: PAPER[name] for name in SOME}
        self.all = self.designs | ({spec: spec for spec in OTHERS} if full else {})
        self.seeds, self.steps, self.judged = (5, 4000, 10) if full else (1, 4, 1) if smoke else (2, 300, 1)
        self.early = min(self.seeds, 3)
        self.model, self.ratio_steps = ("resnet20", 1200) if full else ("lenet", 4 if smoke else 200)
        self.rounds = 3 if full else 1

    def jobs(self, part: str) -> list[Job]:
        """Return the runs of a part of the benchmark that is not timed."""
        if part == "accuracy":
            return self.whole(list(self.all.values()))
        if part == "half-rate":
            return self.whole(list(self.ternary.values()), slower=2)
        if part == "steps":
            return [job for share in SHARES for job in runs("lenet", self.specs, self.early, self.steps * share // 100)]
        if part == "ratios":
            return runs(self.model, [ratio_spec(sparsity) for sparsity in TERNARY], 1, self.ratio_steps)
        return []

    @property
    def ternary(self) -> dict[str, str]:
        """Return the 3LC designs, and the one without a codec."""
        return {name: spec for name, spec in self.designs.items() if spec.startswith("3lc") or name == FLOAT}

    @property
    def specs(self) -> list[str]:
        """Return the designs' codecs."""
        return list(self.designs.values())

    def accuracies(self, spec: str, kept: CachedRuns) -> dict[int, float]:
        """Return the median accuracy over seeds in %, by the fraction of the steps in %."""
        found = {
            share: statistics.median(kept[job]["accuracy"] for job in self.shorter(spec, share)) for share in SHARES
        }
        found[100] = statistics.median(one["accuracy"] for one in self.of(spec, kept))
        return {share: 100 * accuracy for share, accuracy in found.items()}

    def shorter(self, spec: str, share: int) -> list[Job]:
        """Return runs of a fraction of the steps."""
        return runs("lenet", [spec], self.early, self.steps * share // 100)

    def whole(self, specs: Sequence[str], slower: int = 1) -> list[Job]:
        """Return runs of all steps."""
        return runs("lenet", specs, self.seeds, self.steps, self.judged, slower)

    def of(self, spec: str, kept: CachedRuns, slower: int = 1) -> list[Any]:
        """Return the results of runs of all steps, one per seed."""
        return [kept[job] for job in self.whole([spec], slower)]


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


def link_seconds(rate: str, specs: Sequence[str], rounds: int, kept: CachedRuns) -> dict[str, float]:
    """Return the median seconds per step by codec over links of a rate."""
    made = [job for job in link_jobs(specs, rounds) if job["link"] == rate]
    return {spec: statistics.median(kept[job]["seconds"] for job in made if job["spec"] == spec) for spec in specs}


# --- tables ----------------------------------------------------------------------------------------------


def accuracy_table(plan: Plan, kept: CachedRuns) -> Table:
    """Return the last column of Table 1: the accuracy with each codec in both directions."""
    return _accuracies(plan, kept, plan.all, 1)


def half_rate_table(plan: Plan, kept: CachedRuns) -> Table:
    """Return the accuracy table of 3LC with half the learning rate."""
    return _accuracies(plan, kept, plan.ternary, 2)


def _accuracies(plan: Plan, kept: CachedRuns, designs: dict[str, str], slower: int) -> Table:
    rate = RATES["lenet"] / slower
    title = (
        f"LeNet, learning rate {rate:g}, {WORKERS} workers, bsp, {plan.steps} steps, {plan.seeds} seeds, means with the"
        " 95 % interval of the difference"
    )
    heads = ("design", "codec", "accuracy %", "less float", "push, bits per value", "pull", "times fewer bytes")
    table = Table(title, heads)
    none = [100 * one["accuracy"] for one in plan.of("none", kept, slower)]
    for name, spec in designs.items():
        made = plan.of(spec, kept, slower)
        own = [100 * one["accuracy"] for one in made]
        less = [one - other for one, other in zip(own, none, strict=True)]
        mean, half = statistics.fmean(less), interval(less)
        bits = (statistics.fmean(one["bits"][way] for one in made) for way in (0, 1))
        ratio = sum(one["whole"] for one in made) / sum(one["wire"] for one in made)
        shown = f"{mean:+.2f} ± {half:.2f}" if name != FLOAT else ""
        table.row(name, spec, f"{statistics.fmean(own):.2f}", shown, *(f"{one:.3f}" for one in bits), f"{ratio:.1f}")
        least, what = -0.3 if name in ASKED else None, f"rate {rate:g}: accuracy of {spec} less none"
        table.figure(what, mean, "points", least=least, met=None if least is None else is_as_good(mean, half))
    return table


def is_as_good(mean: float, half: float) -> bool:
    """Return whether a difference is within 0.3 points, or has a meaningful interval that includes 0."""
    return mean >= -0.3 or (mean + half >= 0 and half <= WIDE)


def steps_table(plan: Plan, kept: CachedRuns) -> Table:
    """Return the data of Figures 3 and 5: accuracy by number of steps."""
    title = f"LeNet, accuracy in % after a part of {plan.steps} steps, {plan.early} seeds"
    table = Table(title, ("design", *(f"{share} %" for share in SHARES)))
    for name, spec in plan.designs.items():
        made = [statistics.fmean(100 * kept[job]["accuracy"] for job in plan.shorter(spec, share)) for share in SHARES]
        table.row(name, *(f"{mean:.2f}" for mean in made))
        for share, mean in zip(SHARES, made, strict=True):
            table.figure(f"accuracy of {spec} after {share} % of the steps", mean, "%")
    return table


def ratio_spec(sparsity: str) -> str:
    """Return the spec of 3LC for Table 2, which does not encode normalisation layers."""
    return f"3lc:sparsity={sparsity},small=1"


def ratios_table(plan: Plan, kept: CachedRuns) -> Table:
    """Return Table 2: the compression ratios of 3LC."""
    title = f"{plan.model}, {WORKERS} workers, bsp, {plan.ratio_steps} steps: how many times fewer bytes than float32"
    table = Table(title, ("3LC", "payload", "push, bits per value", "pull", "all frames", "the paper's"))
    for sparsity, paper in TERNARY.items():
        (job,) = runs(plan.model, [ratio_spec(sparsity)], 1, plan.ratio_steps)
        run = kept[job]
        push, pull = run["bits"]
        payload, wire = 64 / (push + pull), run["whole"] / run["wire"]
        table.row(f"s={sparsity}", f"{payload:.1f}", f"{push:.3f}", f"{pull:.3f}", f"{wire:.1f}", f"{paper:g}")
        name = f"{plan.model}: ratio of 3LC, s={sparsity}"
        table.figure(f"{name}, payload", payload, "x", least={"1": 39.0, "1.75": 107.0}.get(sparsity))
        table.figure(f"{name}, all frames", wire, "x")
    return table


def links_table(plan: Plan, kept: CachedRuns) -> Table:
    """Return the speedups of Table 1."""
    heads = ("design", *(head for rate in LINK_STEPS for head in (f"{rate}, s a step", "times faster")))
    table = Table(f"{LINKED}, {WORKERS} workers and a server, bsp, links shaped by tc, medians of {plan.rounds}", heads)
    seconds = {rate: link_seconds(rate, plan.specs, plan.rounds, kept) for rate in LINK_STEPS}
    for name, spec in plan.designs.items():
        cells = []
        for rate, medians in seconds.items():
            faster = medians["none"] / medians[spec]
            cells += [f"{medians[spec]:.3f}", f"{faster:.2f}"]
            table.figure(f"{rate}: seconds per step, {spec}", medians[spec], "s", reference=medians["none"])
            if (name, rate) == ("3LC (s=1.75)", "10mbit"):
                table.figure(f"{rate}: faster by {spec}", faster, "times", least=15)
        table.row(name, *cells)
    return table


TABLES: dict[str, Callable[[Plan, CachedRuns], Table]] = {
    "accuracy": accuracy_table,
    "half-rate": half_rate_table,
    "steps": steps_table,
    "ratios": ratios_table,
    "links": links_table,
}


def compression(given: Given) -> Iterator[Table]:
    """Yield the tables, and write the figures if they are wanted."""
    plan, kept = Plan(given.full, given.smoke), CachedRuns(given.keep)
    for part in [given.only] if given.only else ["accuracy"] if given.smoke else TABLES:
        kept.complete(plan.jobs(part), train, 1 if given.smoke else given.jobs)
        if part == "links":
            kept.complete(link_jobs(plan.specs, plan.rounds), run_linked, 1)
        yield TABLES[part](plan, kept)
    if given.plots:
        import _plots  # imports matplotlib only when needed

        _plots.draw(plan, kept, given.plots)


if __name__ == "__main__":
    options = {
        "--only": {"choices": tuple(TABLES)},
        "--jobs": {"type": int, "default": os.cpu_count() or 1},
        "--keep": {"type": Path},
        "--plots": {"type": Path},
    }
    bench(__file__, __doc__, compression, options)
