"""Tables 1 and 2 and Figures 3 to 6 of 3LC beside ours.

bin/papers 3lc           time per step at three rates; LeNet with four workers, 200 steps
bin/papers 3lc --full    LeNet with ten workers and 2,000 steps, with every design (30 minutes)

Times are those of traffic alone: ResNet-110 with ten workers, two on a machine, and a server. Accuracies after 4,000
steps, ratios and bits are those that bin/bench compression --full has recorded. --data-dir trains on CIFAR-10.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from _bench.cached_runs import CachedRuns, Job
from _bench.cli import Given
from _bench.simulated import mean, run
from _bench.tables import interval
from _table import Part, show
from published import Figure, read

from gossipx.tasks.costs import published_sizes

paper = read("3lc")
BIN = Path(__file__).parents[1]
sys.path.append(str(BIN / "benches"))
from _cluster import RATES, train  # noqa: E402
from compression import FLOAT, PAPER, SHARES, SPARSITIES, ratio_spec, runs  # noqa: E402

BITS = {FLOAT: 32.0, "8-bit int": 8.0, "Stoch 3-value b-3-5": 1.6, "MQE 1-bit int": 1.0, "2 local steps": 16.0}
"""Bits per value of designs that fix them; two local steps send 32 every second step."""
SPARSE = 0.05 * 32 + 1
"""The largest 5 % as float32, and a bitmap (section 4.2)."""
LC = {"1.00": "3LC (s=1.00)", "1.50": "3LC (s=1.50)", "1.75": "3LC (s=1.75)", "1.90": "3LC (s=1.90)"}
SMALL = 64
"""Tensors of at most this size, here normalisation layers and biases, are not compressed (section 4.2)."""
COMPUTE = 0.37
"""Seconds of a step's computation: less than 3LC's 0.39 s at 100 Mbit/s, in which there is traffic, too."""
LINKS = ("10mbit", "100mbit", "1gbit")
QUARTERS = 4
"""Evaluations, at 25, 50, 75 and 100 % of the steps, as in Figures 3 and 5."""
LATER = 0.7
"""The part of the training after which the paper's pushes become larger than pulls."""
RECORDED = "recorded by earlier code: LeNet on Fashion-MNIST, four workers and a server"
DIVERGED = 0.2
"""A model with a lower accuracy is as good as none."""


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    kept = CachedRuns(BIN.parent / "runs" / "codecs" / "compression.jsonl")
    bits = {f"3LC (s={float(sparsity):.2f})": fmean(_ratio(kept, sparsity)["bits"]) for sparsity in SPARSITIES}
    yield _ratios(kept)
    if not given.smoke:
        times, seconds = _speedups(given.of(1, 6, 20), bits)
        yield from (times, *_accuracies(kept), _steps(kept, seconds))
    yield _trained(given)


# --- traffic --------------------------------------------------------------------------------------


def bits_of(own: dict[str, float], design: str) -> float:
    """Return the bits per value of a design: 3LC's as recorded, the others' by definition."""
    return own[design] if design in own else BITS.get(design, SPARSE)


def seconds_of(own: dict[str, float], design: str, link: str, steps: int) -> float:
    """Return the seconds of a step with ten workers on five machines, and a server on a sixth."""
    sizes = [count for _, count in published_sizes("resnet110")]
    small = sum(count for count in sizes if count <= SMALL) / sum(sizes)
    share = small + (1 - small) * bits_of(own, design) / 32
    server: dict[str, Any] = {"servers": "10", "servers_only": True, "sync": "bsp"}
    simulation: dict[str, Any] = {"peers": 11, "work": "traffic", "model": "resnet110"}
    if design != FLOAT:
        simulation["encoded"] = share
        server |= {"push_codec": "int8", "pull_codec": "int8"}  # any codec: encoded has its size
    tables = {
        "simulation": simulation,
        "server": server,
        "compute": {"seconds": COMPUTE},
        "network": {"preset": link, "sites": 6, "uplink": link},  # a machine's workers share its link
        "exchange": {"peer_timeout": 3600.0},  # a float transfer takes more than a minute
    }
    first, whole = (mean(run(tables, {"run": {"iterations": each}}).summary.train_seconds) for each in (1, 1 + steps))
    return (whole - first) / steps  # the first tables are raw


def _speedups(steps: int, own: dict[str, float]) -> tuple[Part, dict[str, float]]:
    """Return Table 1's speedups, and the seconds of a step at 10 Mbit/s by design."""
    setting = (
        f"traffic of ResNet-110, {COMPUTE} s of computation per step; 3LC's bits are ours of Table 2 below, those of"
        " other designs by definition; 2 local steps"
        " send half of the bytes in each step in place of all in every second; no time for encoding, of which the"
        " paper's steps have some; all tensors share a link at once, so that pulls hardly overlap with pushes"
    )
    made = Part("Table 1: speedup", setting)
    speedup: dict[str, dict[str, float]] = {link: {} for link in LINKS}
    each = {link: {design: seconds_of(own, design, link, steps) for design in PAPER} for link in LINKS}
    for link, seconds in each.items():
        published = paper.figures.get(f"derived/step/{link}", "not given")
        made.add(f"{FLOAT} at {link}, time of a step", published, seconds[FLOAT], "s")
        for design in list(PAPER)[1:]:
            speedup[link][design] = seconds[FLOAT] / seconds[design]
            made.add(f"{design} at {link}", paper[f"table-1/{design}/{link}"], speedup[link][design], "times")
    slow, other, fast = (speedup[link] for link in LINKS)
    first = [max(of, key=lambda design: of[design]) in LC.values() for of in (slow, other, fast)]
    claim = paper["table-1/speedup"]
    made.add("3LC is the fastest at all rates", claim, sum(first), "of 3 rates", all(first), holds=True)
    for link, of in speedup.items():
        theirs = sorted(of, key=lambda design: paper[f"table-1/{design}/{link}"].value)
        same = [of[one] <= of[two] for one, two in itertools.pairwise(theirs)]
        what, told = f"neighbours in the paper's order at {link}", " < ".join(theirs)
        made.add(what, told, sum(same), f"of {len(same)}", all(same), link == LINKS[0])
    falls = all(slow[design] >= other[design] >= fast[design] for design in slow)
    made.add("speedups fall with the rate", "Table 1", slow[LC["1.00"]] / fast[LC["1.00"]], "times", falls, True)
    one = fast["MQE 1-bit int"] / fast["8-bit int"]
    made.add("MQE 1-bit int / 8-bit int at 1gbit", paper["figure-3/1gbit/one-bit"], one, "", one < 1)
    return made, each[LINKS[0]]


# --- recorded training ----------------------------------------------------------------------------


def _recorded(kept: CachedRuns, design: str, slower: int = 1) -> list[Any]:
    return [kept[job] for job in runs("lenet", [PAPER[design]], 5, 4000, 10, slower)]


def _accuracies(kept: CachedRuns) -> list[Part]:
    setting = f"{RECORDED}, 4,000 steps, five seeds; mean, paired by seed"
    made = Part("Table 1: accuracy, less that of 32-bit float", setting)
    exact = [one["accuracy"] for one in _recorded(kept, FLOAT)]
    made.add(FLOAT, paper[f"table-1/{FLOAT}/accuracy"], 100 * fmean(exact), "%")
    lost = {design: _lost(made, design, _recorded(kept, design), exact) for design in list(PAPER)[1:]}
    worse = lost["Stoch 3-value b-3-5"] - lost[LC["1.00"]]
    made.add("Stoch 3-value less 3LC (s=1.00)", paper["figure-3/stochastic"], worse, "points", worse < 0)
    tails = {design: fmean(one["losses"][-1] for one in _recorded(kept, design)) for design in PAPER}
    close = tails[LC["1.00"]] / tails[FLOAT]
    made.add("training loss, 3LC (s=1.00) / float", paper["figure-4/3lc"], close, "", close < 1.1)
    claim, others = paper["figure-4/others"], [d for d in PAPER if d not in (FLOAT, *LC.values())]
    higher = [tails[design] > tails[LC["1.00"]] for design in others]
    made.add("designs with more training loss than 3LC", claim, sum(higher), f"of {len(others)}", all(higher))
    slower = Part("The same with half the learning rate", setting)
    exact = [one["accuracy"] for one in _recorded(kept, FLOAT, 2)]
    slower.add(FLOAT, paper[f"table-1/{FLOAT}/accuracy"], 100 * fmean(exact), "%")
    lost = {design: _lost(slower, design, _recorded(kept, design, 2), exact) for design in LC.values()}
    dense = lost[LC["1.90"]] - min(lost[LC[s]] for s in ("1.00", "1.50", "1.75"))
    slower.add("3LC, s=1.90 less the next", paper["figure-5/1.90"], dense, "points", dense < 0)
    return [made, slower]


def _lost(made: Part, design: str, runs: Sequence[Any], exact: Sequence[float]) -> float:
    """Add how much more accurate a design is than 32-bit float, and return it, in points."""
    own = [one["accuracy"] for one in runs]
    pairs = [100 * (one - of) for one, of in zip(own, exact, strict=True)]
    diverged = sum(accuracy < DIVERGED for accuracy in own)
    told = f"{design}, accuracy ({diverged} of {len(own)} seeds diverged)" if diverged else f"{design}, accuracy"
    half = None if diverged else interval(pairs)
    made.add(told, paper[f"table-1/difference/accuracy/{design}"], fmean(pairs), half=half)
    return fmean(pairs)


def _steps(kept: CachedRuns, seconds: dict[str, float]) -> Part:
    """Return Figures 3 and 5: accuracy and time of runs of a part of the steps."""
    setting = f"{RECORDED}, three seeds; a run of a part of the steps has its own schedule; time at 10 Mbit/s as above"
    made = Part("Figures 3 and 5: accuracy and training time with fewer steps", setting)
    found: dict[tuple[str, int], float] = {}
    for design in PAPER:
        for share in SHARES:
            steps = 4000 * share // 100
            jobs = runs("lenet", [PAPER[design]], 3, steps)
            found[design, share] = 100 * fmean(kept[job]["accuracy"] for job in jobs)
            hours = steps * seconds[design] / 3600
            made.add(f"{design}, {share} % of the steps", "a curve", found[design, share], f"% after {hours:.2f} h")
    first = SHARES[0]
    dense, sparse = (found[LC[s], first] for s in ("1.00", "1.75"))
    claim = paper["figure-3/10mbit/fewer-steps"]
    made.add(f"{first} % of the steps, s=1.00 less s=1.75", claim, dense - sparse, "points", dense > sparse)
    return made


def _ratios(kept: CachedRuns) -> Part:
    setting = "recorded: ResNet-20 on Fashion-MNIST, four workers, 1,200 steps, one seed; Figure 6: LeNet, five seeds"
    made = Part("Table 2 and Figure 6: compression", setting)
    bits = {}
    for sparsity in SPARSITIES:
        bits[sparsity], column = fmean(_ratio(kept, sparsity)["bits"]), f"s={float(sparsity):.2f}"
        made.add(f"{column}, bits", paper[f"table-2/bits/{column}"], bits[sparsity], "bits per value")
        made.add(f"{column}, ratio", paper[f"table-2/ratio/{column}"], 32 / bits[sparsity], "times")
    grows = bits["1"] > bits["1.5"] > bits["1.75"]
    made.add("the ratio grows from s=1.00 to 1.75", "Table 2", bits["1"] / bits["1.75"], "times", grows)
    most = paper["table-2/ratio/s=1.90"].value / paper["table-2/ratio/s=1.75"].value
    grows = bits["1.75"] / bits["1.9"]
    made.add("and from s=1.75 to 1.90", Figure("", most, "times", "Table 2"), grows, "times")
    dense = paper["table-2/bits/No ZRE"].value
    halves = dense / bits["1"]
    made.add("zero-run encoding, s=1.00", paper["table-2/zero-runs"], halves, "times smaller", 1.5 < halves < 4)
    for sparsity in ("1.00", "1.75"):
        curves = [(one["push"], one["pull"]) for one in _recorded(kept, LC[sparsity])]
        for way, of in (("push", 0), ("pull", 1)):
            for tenth in (0, 4, 9):
                points = [pair[of][tenth * len(pair[of]) // 10 : (tenth + 1) * len(pair[of]) // 10] for pair in curves]
                what = f"s={sparsity}, {way}, {10 * tenth} to {10 * tenth + 10} % of the training"
                made.add(what, "a curve of Figure 6", fmean(map(fmean, points)), "bits per value")
        for when, later in (("before", False), ("after", True)):
            smaller = 100 * fmean(
                push < pull
                for pushes, pulls in curves
                for number, (push, pull) in enumerate(zip(pushes, pulls, strict=True))
                if (number >= LATER * len(pushes)) is later
            )
            says = paper["figure-6/pushes-become-larger"] if later else paper["figure-6/pushes"]
            agrees = smaller < 50 if later else smaller > 50
            what = f"s={sparsity}, {when} 70 % of the training: pushes smaller than pulls"
            made.add(what, says, smaller, "% of the steps", agrees)
    return made


def _ratio(kept: CachedRuns, sparsity: str) -> Any:
    return kept[runs("resnet20", [ratio_spec(sparsity)], 1, 1200)[0]]


# --- training -------------------------------------------------------------------------------------


@functools.cache
def _result(design: str, steps: int, workers: int, data_dir: str | None) -> Any:
    job: Job = {"model": "lenet", "spec": PAPER[design], "seed": 0, "steps": steps, "judged": QUARTERS}
    if data_dir is not None:
        job["data_dir"] = data_dir
    return train({**job, "rate": RATES["lenet"], "workers": workers})


def _trained(given: Given) -> Part:
    workers, steps = given.of((2, 4), (4, 200), (10, 2000))
    some, data_dir = [FLOAT, "8-bit int", LC["1.00"], LC["1.75"]], given.data_dir
    designs = given.of(some, some, list(PAPER))
    data = "CIFAR-10" if data_dir else "Fashion-MNIST"
    setting = f"LeNet on {data}, {workers} workers, {steps} steps, one seed, trained by this command"
    made = Part("The same, trained now", setting)
    bits: dict[str, float] = {}
    for design in designs:
        found = _result(design, steps, workers, data_dir)
        bits[design] = fmean(found["bits"])
        made.add(f"{design}, accuracy here", paper[f"table-1/{design}/accuracy"], 100 * found["accuracy"], "%")
        known: Any = f"{BITS.get(design, SPARSE):g} by definition"
        if design in LC.values():
            known = paper[f"table-2/bits/{design[5:-1]}"]
        made.add(f"{design}, bits here", known, bits[design], "bits per value")
    fewer = bits[LC["1.00"]] / bits[LC["1.75"]]
    published = Figure("", 0.812 / 0.298, "times", "Table 2")
    made.add("bits, s=1.00 / s=1.75, here", published, fewer, "times", holds=True)
    dense = str(paper["base-3^5/bits"])
    made.add("bits with zero runs below base-3^5", dense, bits[LC["1.00"]], "bits", bits[LC["1.00"]] < 1.6, holds=True)
    return made


if __name__ == "__main__":
    show(paper, parts, __doc__)
