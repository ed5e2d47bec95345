"""Table II and Figures 3 to 7 of Adaptive Communication beside ours, in virtual time.

bin/papers adaptive-gossip           LeNet, one seed of 300 iterations; times of 5,000 iterations
bin/papers adaptive-gossip --full    LeNet, five seeds of 3,000 iterations; ConvNet, one of 1,500; times of 50,000

Times are those of traffic alone, at four peers with 1 Gbit/s, since ImageNet's models cannot be trained here. Accuracy
and retrievals are those of the built-in task; --data-dir trains on CIFAR-10.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from _simulated import Run, run
from _table import Part, show
from published import Paper

PEERS = 4
PARAMETERS = {"alexnet": None, "googlenet": None, "convnet": 2_112_970}
"""None: those of the model that gossipx has. ConvNet's layers are not given: about 2 million parameters has
cuda-convnet's model with two locally connected layers, 4,864 + 102,464 + 1,329,408 + 664,704 + 11,530."""
BASE: dict[str, dict[str, Any]] = {
    "simulation": {"peers": PEERS},
    "network": {"preset": "1gbit"},
    "sync": {"blocking": True, "finish": "none"},
}


def parts(paper: Paper, full: bool, arguments: argparse.Namespace) -> Sequence[Part]:
    """Return the tables."""
    return [times(paper, 50_000 if full else 5_000), *trained(paper, full, arguments.data_dir)]


# --- times ----------------------------------------------------------------------------------------


def times(paper: Paper, iterations: int) -> Part:
    """Return the training times of Table II and Figure 6, with the paper's retrievals as inputs."""
    setting = (
        "traffic only; time of an iteration from Figure 6 (AlexNet) or derived from Table II; retrievals are inputs,"
    )
    setting += f" {iterations} iterations, scaled to the paper's 50,000"
    made = Part("Table II and Figure 6: training time", setting)
    saved: dict[str, float] = {}
    for model in PARAMETERS:
        tau, adaptive = (paper.figures[f"table-2/retrievals/{model}/{name}"].value for name in ("tau:10", "adaptive"))
        found = {number: _minutes(paper, model, number, iterations) for number in (0.0, tau, adaptive)}
        for name, number in (("tau:10", tau), ("adaptive", adaptive)):
            made.add(f"{model}, {name}", paper.figures[f"table-2/time/{model}/{name}"], found[number], "min")
        saved[model] = 100 * (1 - found[adaptive] / found[tau])
        order = found[0.0] < found[adaptive] < found[tau]
        made.add(f"{model}, never", paper.claims["figure-6/never-is-fastest"], found[0.0], "min", order, holds=True)
        made.add(f"{model}, time saved", paper.figures[f"summary/time-saved/{model}"], saved[model], "% of tau:10's")
    largest = saved["alexnet"] > max(saved["googlenet"], saved["convnet"])
    made.add(
        "large models save more", paper.claims["table-2/large-models-benefit"], saved["alexnet"], "%", largest, True
    )
    return made


def _minutes(paper: Paper, model: str, retrievals: float, iterations: int) -> float:
    """Return the minutes of 50,000 iterations with a number of retrievals."""
    sizes: dict[str, Any] = {"work": "traffic", "model": model}
    if PARAMETERS[model] is not None:
        sizes["parameters"] = PARAMETERS[model]
    seconds = paper.figures[f"derived/{model}/iteration"].value
    chosen = {"retrievals": [round(retrievals * iterations / 50_000)]}
    found = run(
        BASE, {"simulation": {**sizes, **chosen}, "run": {"iterations": iterations}, "compute": {"seconds": seconds}}
    )
    return found.seconds * 50_000 / iterations / 60


# --- training -------------------------------------------------------------------------------------


def trained(paper: Paper, full: bool, data_dir: str | None) -> list[Part]:
    """Return what real training shows: Table II's retrievals and accuracies, and Figures 3, 4, 5 and 7."""
    made = []
    lengths = {"lenet": (3_000, 5), "convnet": (1_500, 1)} if full else {"lenet": (300, 1)}
    for model, (iterations, seeds) in lengths.items():
        task = {"task": "cifar10", "data_dir": data_dir} if data_dir else {"task": "fashion-mnist"}
        common = {"task": {"model": model, **task}, "compute": {"seconds": 0.03}}

        def runs(policy: str, **more: Any) -> list[Run]:
            length = {"iterations": iterations, "eval_interval": 0, **more}  # noqa: B023
            each = [{"sync": {"policy": policy}, "run": {**length, "seed": seed}} for seed in range(seeds)]  # noqa: B023
            return [run(BASE, common, one, curves=True) for one in each]  # noqa: B023

        found = {
            "never": runs("never"),
            "tau:10": runs("tau:10", log_interval=1),
            "tau:50": runs("tau:50", log_interval=1),
            "adaptive": runs("adaptive", log_interval=1),
        }
        setting = f"{model} on {task['task']}, {iterations} iterations, {seeds} seeds; the threshold of its preset"
        made += [_table_2(paper, setting, found), _figures(paper, setting, iterations, found)]
    return made


def _table_2(paper: Paper, setting: str, found: dict[str, list[Run]]) -> Part:
    made = Part("Table II and Figure 7: retrievals and accuracy", setting)
    retrievals = {name: fmean(one.retrievals for one in runs) for name, runs in found.items()}
    accuracy = {name: fmean(one.accuracy for one in runs) for name, runs in found.items()}
    for name in ("tau:10", "adaptive"):
        made.add(
            f"retrievals, {name}", paper.figures[f"table-2/retrievals/convnet/{name}"], retrievals[name], "per peer"
        )
    saved = 100 * (1 - retrievals["adaptive"] / retrievals["tau:10"])
    made.add("retrievals saved", paper.figures["summary/retrievals-saved/least"], saved, "%", saved >= 50, holds=True)
    for name in ("tau:10", "adaptive"):
        made.add(f"accuracy, {name}", paper.figures[f"table-2/accuracy/convnet/{name}"], accuracy[name], "of 1")
    lost = 100 * (1 - accuracy["adaptive"] / accuracy["tau:10"])
    made.add("accuracy lost by adaptive", paper.figures["summary/accuracy-lost"], lost, "%", lost <= 5)
    never = accuracy["never"] - accuracy["tau:10"]
    made.add("accuracy of never − tau:10", "0.3 and 0.4 in Figure 6", never, "of 1", never < 0, holds=True)
    return made


def _figures(paper: Paper, setting: str, iterations: int, found: dict[str, list[Run]]) -> Part:
    made = Part("Figures 3, 4, 5 and 7: deltas, distances, and where the retrievals fall", setting)
    sums = {tau: fmean(_sum_per_period(one, tau) for one in found[f"tau:{tau}"]) for tau in (10, 50)}
    larger = sums[50] / sums[10]
    claim = paper.claims["figure-3/larger-tau"]
    made.add("delta summed over a period, tau 50 / 10", claim, larger, "", larger > 1, holds=True)
    thirds = {
        tag: [_mean_of(found["tau:10"], f"sync/{tag}", iterations, part) for part in range(3)]
        for tag in ("delta", "exact_consensus_distance", "delta_difference")
    }
    first, _, last = thirds["delta"]
    claim = paper.claims["figure-3/increases"]
    made.add("delta, last third / first", claim, last / first, "", last > first)
    _, second, last = thirds["exact_consensus_distance"]
    claim = paper.claims["figure-4/constant"]
    made.add("Eq. 8, last third / second", claim, last / second, "", 0.5 < last / second < 2)
    first, _, last = thirds["delta_difference"]
    claim = paper.claims["figure-5/decreases"]
    made.add("difference of delta, last / first", claim, last / first, "", last < first)
    tau, adaptive = (_share_of_second_half(found[name], iterations) for name in ("tau:10", "adaptive"))
    uniform = abs(tau - 0.5) < 0.02
    made.add(
        "share of tau's retrievals in the second half", paper.claims["figure-7/tau-uniform"], tau, "", uniform, True
    )
    claim = paper.claims["figure-7/adaptive-falls"]
    made.add("the same share of adaptive's", claim, adaptive, "", adaptive < 0.5)
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


def _share_of_second_half(runs: list[Run], iterations: int) -> float:
    shares = []
    for peer in (peer for one in runs for peer in one.curves):
        counts = peer["sync/retrievals"]
        shares.append(1 - counts[iterations // 2] / max(counts.values()))
    return fmean(shares)


if __name__ == "__main__":
    show("adaptive-gossip", parts, __doc__ or "", ["--data-dir"])
