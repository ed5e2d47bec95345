"""Table II and Figures 3 to 7 of Adaptive Communication beside ours, in virtual time.

bin/papers adaptive-gossip           LeNet, one seed of 300 iterations; times of 5,000 iterations
bin/papers adaptive-gossip --full    LeNet, five seeds of 3,000 iterations; ConvNet, one of 1,000; times of 50,000

Times are those of traffic alone, at four peers with 1 Gbit/s, since ImageNet's models cannot be trained here. Accuracy
and retrievals are those of the built-in task; --data-dir trains on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from _bench.cli import Given
from _bench.simulated import Run, run
from _bench.tables import interval
from _table import Part, show
from published import read

from gossipx.tasks.presets import PRESETS

paper = read("adaptive-gossip")
PEERS = 4
PARAMETERS = {"alexnet": None, "googlenet": 11_000_000, "convnet": 2_112_970}
"""None: those of the model that gossipx has, about the paper's 60 million. GoogLeNet's are the paper's. ConvNet's
layers are not given: about 2 million has cuda-convnet's model with two locally connected layers, 4,864 + 102,464 +
1,329,408 + 664,704 + 11,530."""
ITERATIONS = 50_000
"""Of the paper, to which our times are scaled."""
BASE: dict[str, dict[str, Any]] = {
    "simulation": {"peers": PEERS},
    "network": {"preset": "1gbit"},
    "sync": {"blocking": True, "finish": "none"},
}
SMALL = {"lenet": "LeNet", "convnet": "ConvNet of Caffe's examples, with 0.09 million parameters in place of 2,"}
CONSTANT = {"gamma": 1.0}
"""The learning rate: Caffe's solvers of these models lower it first after more than the paper's 50,000 iterations."""


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    yield times(given.of(ITERATIONS // 1000, ITERATIONS // 10, ITERATIONS))
    yield from () if given.smoke else trained(given.full, given.data_dir)


# --- times ----------------------------------------------------------------------------------------


def times(iterations: int) -> Part:
    """Return the training times of Table II and Figure 6, with the paper's retrievals as inputs."""
    setting = (
        "traffic only, the paper's numbers of parameters and of retrievals; the time of an iteration is that of Figure "
        "6 (AlexNet), or derived from Table II's two times, so that for GoogLeNet and ConvNet the time of adaptive is "
        f"about the paper's by construction; {iterations} iterations, scaled to the paper's {ITERATIONS}"
    )
    made = Part("Table II and Figure 6: training time", setting)
    saved: dict[str, float] = {}
    for model in PARAMETERS:
        tau, adaptive = (paper[f"table-2/retrievals/{model}/{name}"].value for name in ("tau:10", "adaptive"))
        found = {number: _minutes(model, number, iterations) for number in (0.0, tau, adaptive)}
        for name, number in (("tau:10", tau), ("adaptive", adaptive)):
            made.add(f"{model}, {name}", paper[f"table-2/time/{model}/{name}"], found[number], "min")
        if model == "alexnet":
            made.add("alexnet, never", paper["figure-6/never/time"], found[0.0], "min")
            shorter = found[0.0] / min(found[tau], found[adaptive])
            made.add("alexnet, never / the next", paper["figure-6/never-is-fastest"], shorter, "", shorter < 1)
            measured = found[adaptive] + paper["derived/alexnet/measuring"].value * ITERATIONS / 60
            figure = paper["table-2/time/alexnet/adaptive"]
            made.add("alexnet, adaptive with the paper's other costs", figure, measured, "min")
        pull = 60 * (found[tau] - found[0.0]) / tau
        made.add(f"{model}, time of a retrieval", paper[f"derived/{model}/retrieval"], pull, "s")
        saved[model] = 100 * (1 - found[adaptive] / found[tau])
        made.add(f"{model}, time saved", paper[f"summary/time-saved/{model}"], saved[model], "% of tau:10's")
    largest = saved["alexnet"] > max(saved["googlenet"], saved["convnet"])
    claim = paper["table-2/large-models-benefit"]
    made.add("AlexNet saves the most", claim, saved["alexnet"], "% of tau:10's", largest, holds=True)
    second = saved["googlenet"] - saved["convnet"]
    made.add("time saved, GoogLeNet less ConvNet", claim, second, "points", second > 0)
    return made


def _minutes(model: str, retrievals: float, iterations: int) -> float:
    """Return the minutes of the paper's iterations with a number of retrievals."""
    sizes: dict[str, Any] = {"work": "traffic", "model": model}
    if PARAMETERS[model] is not None:
        sizes["parameters"] = PARAMETERS[model]
    seconds = paper[f"derived/{model}/iteration"].value
    chosen = {"retrievals": [round(retrievals * iterations / ITERATIONS)]}
    found = run(
        BASE, {"simulation": {**sizes, **chosen}, "run": {"iterations": iterations}, "compute": {"seconds": seconds}}
    )
    return found.seconds * ITERATIONS / iterations / 60


# --- training -------------------------------------------------------------------------------------


def trained(full: bool, data_dir: str | None) -> list[Part]:
    """Return what real training shows: Table II's retrievals and accuracies, and Figures 3, 4, 5 and 7."""
    made = []
    lengths = {"lenet": (3_000, 5), "convnet": (1_000, 1)} if full else {"lenet": (300, 1)}
    for model, (iterations, seeds) in lengths.items():
        task = {"task": "cifar10", "data_dir": data_dir} if data_dir else {"task": "fashion-mnist"}
        common = {
            "task": {"model": model, **CONSTANT, **task},
            "compute": {"seconds": 0.03},
            "run": {"iterations": iterations, "eval_interval": 0, "log_interval": 1},
            "sync": {"distance_interval": 10},
        }
        threshold = PRESETS[model].threshold
        policies = {"never": "never", "tau:10": "tau:10", "tau:50": "tau:50"}
        policies["adaptive"] = f"adaptive:threshold={threshold}"
        found = {
            name: [
                run(BASE, common, {"sync": {"policy": policy}, "run": {"seed": seed}}, curves=True)
                for seed in range(seeds)
            ]
            for name, policy in policies.items()
        }
        given = "the paper's" if model == "convnet" else "chosen for 90 % fewer retrievals than tau:10 in 3,000"
        setting = (
            f"{SMALL[model]} on {task['task']}, {iterations} iterations, {seeds} {'seed' if seeds == 1 else 'seeds'}, "
            f"a constant learning rate; threshold {threshold}, {given}"
        )
        made += [_table_2(setting, found), _figures(setting, iterations, found)]
    return made


def _table_2(setting: str, found: dict[str, list[Run]]) -> Part:
    made = Part("Table II and Figure 7: retrievals and accuracy", setting)
    retrievals = {name: fmean(one.retrievals for one in runs) for name, runs in found.items()}
    accuracy = {name: fmean(one.accuracy for one in runs) for name, runs in found.items()}
    for name in ("tau:10", "adaptive"):
        made.add(f"retrievals, {name}", paper[f"table-2/retrievals/convnet/{name}"], retrievals[name], "retrievals")
    saved = 100 * (1 - retrievals["adaptive"] / retrievals["tau:10"])
    made.add("adaptive retrieves less often", "Table II", saved, "% less", saved > 0, holds=True)
    made.add("retrievals saved", paper["summary/retrievals-saved/least"], saved, "% of tau:10's")
    for name in ("tau:10", "adaptive"):
        made.add(f"accuracy, {name}", paper[f"table-2/accuracy/convnet/{name}"], accuracy[name], "top-1, of 1")
    lost = 100 * (accuracy["tau:10"] - accuracy["adaptive"])
    made.add("accuracy, tau:10 − adaptive", paper["summary/accuracy-lost"], lost, "points")
    lost = 100 * (accuracy["tau:10"] - accuracy["never"])
    figure = paper["derived/alexnet/accuracy-lost"]
    made.add("accuracy, tau:10 − never", figure, lost, "points")
    pairs = [
        100 * (own.accuracy - other.accuracy) for own, other in zip(found["adaptive"], found["never"], strict=True)
    ]
    gained, half = fmean(pairs), interval(pairs) if len(pairs) > 1 else None
    made.add("accuracy, adaptive − never", figure, gained, "points", half=half)
    return made


def _figures(setting: str, iterations: int, found: dict[str, list[Run]]) -> Part:
    made = Part("Figures 3, 4, 5 and 7: deltas, distances, and where the retrievals fall", setting)
    sums = {tau: fmean(_sum_per_period(one, tau) for one in found[f"tau:{tau}"]) for tau in (10, 50)}
    claim = paper["figure-3/larger-tau"]
    made.add("delta summed over a period, tau 50 / 10", claim, sums[50] / sums[10], "", sums[50] > sums[10])
    delta, distance, difference = (
        [_mean_of(found["tau:10"], f"sync/{tag}", iterations, part) for part in range(3)]
        for tag in ("delta", "exact_consensus_distance", "delta_difference")
    )
    grows, later = delta[1] / delta[0], delta[2] / delta[1]
    made.add("delta, second third / first", paper["figure-3/increases"], grows, "", grows > 1)
    slower = abs(later - 1) < abs(grows - 1)
    made.add("delta, last third / second", paper["figure-3/converges"], later, "", slower)
    constant = distance[2] / distance[1]
    made.add("distance (Eq. 8), last third / second", paper["figure-4/constant"], constant, "", abs(constant - 1) < 0.1)
    falls = difference[2] / difference[0]
    made.add("difference of delta, last third / first", paper["figure-5/decreases"], falls, "", falls < 1, holds=True)
    fallen = {name: 100 * fmean(map(_half_of, found[name])) / iterations for name in ("tau:10", "adaptive")}
    made.add("half of tau:10's retrievals, after", paper["figure-7/tau-uniform"], fallen["tau:10"], "% of the run")
    claim = paper["figure-7/adaptive-falls"]
    early = fallen["adaptive"] < 50
    made.add("half of adaptive's retrievals, after", claim, fallen["adaptive"], "% of the run", early, holds=True)
    first, last = (paper[f"figure-7/frequent/{end}"].value * 100 / ITERATIONS for end in ("from", "to"))
    told = f"frequent from {first:.0f} to {last:.0f} % of the run (Figure 7)"
    parts = (0.0, first), (first, last), (last, 100.0)
    density = [fmean(_density(one, iterations, *part) for one in found["adaptive"]) for part in parts]
    for part, often, agrees in zip(parts, density, (None, density[1] == max(density), None), strict=True):
        what = f"retrievals from {part[0]:.0f} to {part[1]:.0f} % of the run"
        made.add(what, told, often, "times as dense as evenly spaced", agrees)
    return made


def _sum_per_period(one: Run, tau: int) -> float:
    """Return the mean distance travelled in a period, Σ Δ."""
    deltas = [list(peer["sync/delta"].values()) for peer in one.curves]
    return fmean(sum(peer[at : at + tau]) for peer in deltas for at in range(0, len(peer) - tau + 1, tau))


def _mean_of(runs: list[Run], tag: str, iterations: int, third: int) -> float:
    """Return the mean of a curve in a third of the run."""
    first, last = iterations * third / 3, iterations * (third + 1) / 3
    values = [v for one in runs for peer in one.curves for step, v in peer[tag].items() if first < step <= last]
    return fmean(values)


def _density(one: Run, iterations: int, first: float, last: float) -> float:
    """Return how dense the retrievals are in a part of the run, in %, relative to even spacing; a mean over peers."""
    share = []
    for curve in (peer["sync/retrievals"] for peer in one.curves):
        ends = [
            max((n for step, n in curve.items() if step <= iterations * end / 100), default=0.0)
            for end in (first, last)
        ]
        share.append((ends[1] - ends[0]) / max(curve.values()))
    return 100 * fmean(share) / (last - first)


def _half_of(one: Run) -> float:
    """Return the iteration at which half of the retrievals have been made, a mean over the peers."""
    curves = [peer["sync/retrievals"] for peer in one.curves]
    return fmean(next(step for step, number in curve.items() if 2 * number >= max(curve.values())) for curve in curves)


if __name__ == "__main__":
    show(paper, parts, __doc__)
