"""Table 1.1 and Figures 5.1 to 5.8 of the Modularized Parameter Server beside ours, in virtual time.

bin/papers modular-server           6 iterations of traffic; LeNet for 60 iterations, one seed
bin/papers modular-server --full    41 iterations of traffic; LeNet for 1,200 iterations, three seeds

Speeds are those of traffic alone, with four workers that are the four servers, too, at 1 Gbit/s. Accuracy is that of
LeNet on Fashion-MNIST, in place of ResNet-110 on CIFAR-10; --data-dir trains on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from _bench.cli import Given
from _bench.simulated import Run, mean, merged, run
from _placements import placed
from _table import Part, show
from _workers import Stale
from published import read

from gossipx.parts import Parts
from gossipx.server import placement as placements
from gossipx.tasks.costs import published_sizes

paper = read("modular-server")
WORKERS = 4
RATE = 1e9 / 8
MODELS = {"resnet": "resnet110", "inception-v4": "inception-v4", "googlenet": "googlenet"}
BUCKETS = {"resnet": 2**18, "inception-v4": 2**21, "googlenet": 2**21}
"""Bytes of a message that holds small tensors. The default leaves little of ResNet to overlap, which a row shows."""
GOOGLENET = 0.680 * 1.583 / 12.284
"""Seconds: the thesis gives none for GoogLeNet; that of Inception-v4 by multiply-adds."""
TRADITIONAL: dict[str, Any] = {"sync": "bsp", "wait_free": False, "placement": "heuristic"}
WAITS = {"forward": 0.0}
"""With traditional backpropagation all values are received before the forward pass."""
WAIT_FREE: dict[str, Any] = {"sync": "bsp", "placement": "heuristic"}
TOP = {"push_codec": "topk:ratio=0.01", "pull_codec": "topk:ratio=0.01"}
ENCODED = 0.02
"""Of raw values: one in a hundred, as index and value, in both directions (Code 4.2 and 4.3)."""
SSP = {"sync": "ssp:staleness=5"}
STALE = Parts(sync=Stale(5, gathers=True))
"""SSP as the thesis has it (Code 4.4): a worker pushes and pulls only when its tables are too old. ``ssp`` pushes and
pulls in each iteration."""
SLIGHTLY = 3
"""Points of accuracy."""
POINTS = 12
"""Of a curve of accuracy."""
JITTER = "log-normal:sigma=0.1"
EVENLY = {"uneven": 0.0}
PER_MESSAGE = 1e-4
PLACEMENTS = ("uniform", "round-robin", "heuristic")


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    yield _sizes()
    yield _variations()
    yield _scaling(given.of(2, 6, 21), given.of((2,), (2, 4), (1, 2, 4, 8, 16)))
    if given.smoke:
        return
    iterations = given.of(2, 6, 41)
    speeds = {model: _speeds(model, iterations) for model in ("resnet", "inception-v4")}
    yield _placements(given.full)
    yield _optimizations(speeds, iterations)
    yield _utilisation(speeds["resnet"])
    yield from _accuracy(given.full, given.data_dir, speeds["resnet"])


# --- traffic --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """How fast workers are once they are under way.

    Attributes:
        speedup: iterations per second of all workers, relative to a single machine.
        gpu: computation, in percent of the time.
        network: what a worker receives, in percent of what its link carries.
    """

    speedup: float
    gpu: float
    network: float


def seconds_of(model: str) -> float:
    """Return the seconds of an iteration on a single machine."""
    return GOOGLENET if model == "googlenet" else paper[f"derived/{model}/iteration"].value


def speed(
    model: str,
    iterations: int,
    server: Mapping[str, Any],
    workers: int = WORKERS,
    own: Parts | None = None,
    network: Mapping[str, Any] = EVENLY,
    spread: str = JITTER,
) -> Speed:
    """Return the speed of workers that are servers, too, without their first iteration."""
    simulation: dict[str, Any] = {"peers": workers, "work": "traffic", "model": MODELS[model]}
    if "push_codec" in server:
        simulation["encoded"] = ENCODED
    step = seconds_of(model)
    settings = {"servers": ",".join(map(str, range(workers))), "bucket": BUCKETS[model], **server}
    tables = {
        "simulation": simulation,
        "server": {name: value for name, value in settings.items() if value is not None},
        "compute": {"seconds": step, "spread": spread, **({} if server.get("wait_free", True) else WAITS)},
        "network": {"preset": "1gbit", **network},
    }
    first, whole = (run(tables, {"run": {"iterations": each}}, parts=own).summary for each in (1, iterations))
    more = iterations - 1
    seconds = (mean(whole.train_seconds) - mean(first.train_seconds)) / more
    received = (mean(whole.bytes_received) - mean(first.bytes_received)) / more
    return Speed(workers * step / seconds, min(100.0, 100 * step / seconds), 100 * received / (RATE * seconds))


def _speeds(model: str, iterations: int) -> dict[str, Speed]:
    servers: dict[str, tuple[dict[str, Any], Parts | None]] = {
        "traditional": (TRADITIONAL, None),
        "wait-free": (WAIT_FREE, None),
        "wait-free, top-1 %": ({**WAIT_FREE, **TOP}, None),
        "wait-free, SSP 5": (WAIT_FREE, STALE),
        "wait-free, ssp:5": ({**WAIT_FREE, **SSP}, None),
        "all": ({**WAIT_FREE, **TOP}, STALE),
        "Tensorflow": ({**WAIT_FREE, "placement": "round-robin"}, None),
    }
    return {name: speed(model, iterations, server, own=own) for name, (server, own) in servers.items()}


def _sizes() -> Part:
    made = Part("Table 1.1: models", "sizes of the models that gossipx has; bits = parameters × 32 × steps per second")
    for column, model in (("resnet", "resnet110"), ("inception-v4", "inception-v4")):
        million = sum(count for _, count in published_sizes(model)) / 1e6
        made.add(f"{column}, parameters", paper[f"table-1.1/parameters/{column}"], million, "million", holds=True)
        bits = million * 32 * paper[f"table-1.1/steps/{column}"].value
        made.add(f"{column}, bits per second", paper[f"table-1.1/bits/{column}"], bits, "Mbit/s")
    densenet = sum(count for _, count in published_sizes("densenet121")) / 1e6
    made.add("densenet (here DenseNet-121)", paper["table-1.1/parameters/densenet"], densenet, "million")
    return made


def _variations() -> Part:
    """Return Figures 5.2 and 5.3, which no run is needed for."""
    made = Part("Figures 5.2 and 5.3: sizes of layers, and variation of what the servers hold", "four servers")
    variations: dict[str, dict[str, float]] = {}
    for model, name in MODELS.items():
        tables = [placements.Table(layer, size) for layer, size in published_sizes(name)]
        sizes = [table.size for table in tables]
        largest = 100 * max(sizes) / sum(sizes)
        made.add(f"{model}, {len(tables)} tensors: the largest", "bars of Figure 5.2", largest, "% of the model")
        found = {one: placed(tables, WORKERS, placements.placement_from(one)) for one in PLACEMENTS}
        variations[model] = {placement: one.variation for placement, one in found.items()}
        for placement, variation in variations[model].items():
            told = "0" if placement == "uniform" else "a bar of Figure 5.3"
            made.add(f"{model}, {placement}: coefficient of variation", told, variation, "of servers' bytes")
        if model == "resnet":
            split = found["uniform"].partitions / len(tables)
            made.add("resnet, uniform: partitions", paper["figure-5.1/uniform/partitions"], split, holds=True)
    inception = variations["inception-v4"]
    claim, least = paper["figure-5.2/inception-v4"], min(inception["round-robin"], inception["heuristic"])
    made.add("inception-v4, others than uniform: the least variation", claim, least, "of servers' bytes", least > 0.05)
    lower = [by["heuristic"] < by["round-robin"] for by in variations.values()]
    claim = paper["figure-5.1/heuristic"]
    made.add("heuristic varies less than round-robin", claim, sum(lower), f"of {len(lower)} models", all(lower), True)
    claim = paper["figure-5.3/round-robin"]
    most = max(variations, key=lambda model: variations[model]["round-robin"]) == "googlenet"
    made.add("round-robin varies most with GoogLeNet", claim, variations["googlenet"]["round-robin"], "", most)
    return made


def _placements(full: bool) -> Part:
    alone = (
        "each tensor alone in a message" if full else "each tensor of ResNet alone in a message, the others' grouped"
    )
    setting = (
        f"traffic, bsp, traditional backpropagation, {alone}, 0.1 ms for each message (chosen: without it, "
        f"uniform is about as fast); GoogLeNet's step of {GOOGLENET:.3f} s is chosen"
    )
    made = Part("Figure 5.1: placements, speedup at four workers", setting)
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        found[model] = {}
        for placement in PLACEMENTS:
            bucket = 0 if full or model == "resnet" else BUCKETS[model]
            server = {**TRADITIONAL, "bucket": bucket, "placement": placement}
            network = {**EVENLY, "per_message": PER_MESSAGE}
            ran = speed(model, 9 if full else 2, server, network=network, spread="constant")
            found[model][placement] = ran.speedup
            made.add(f"{model}, {placement}", "a bar of Figure 5.1", ran.speedup, "times a single machine")

    def ratio(model: str, one: str, claim: str, agrees: bool, holds: bool) -> None:
        by = found[model]
        made.add(f"{model}, {one} / heuristic", paper[claim], by[one] / by["heuristic"], "", agrees, holds)

    resnet, inception, googlenet = found["resnet"], found["inception-v4"], found["googlenet"]
    ratio("resnet", "uniform", "figure-5.1/resnet/uniform", resnet["uniform"] < 0.9 * resnet["heuristic"], True)
    best = inception["uniform"] >= max(inception.values())
    ratio("inception-v4", "uniform", "figure-5.1/inception-v4/uniform", best, False)
    worst = googlenet["round-robin"] <= min(googlenet.values())
    ratio("googlenet", "round-robin", "figure-5.3/round-robin", worst, True)
    average = {name: fmean(by[name] for by in found.values()) for name in resnet}
    first = average["heuristic"] >= max(average.values())
    made.add("heuristic, mean", paper["figure-5.1/heuristic"], average["heuristic"], "times a single machine", first)
    return made


def _optimizations(speeds: dict[str, dict[str, Speed]], iterations: int) -> Part:
    setting = (
        f"traffic, heuristic placement, {iterations} iterations that vary by {JITTER}, wait-free in messages of 256 "
        "KiB with ResNet and 2 MiB with others; top-1 % sends 2 % of the bytes both ways, and encoding takes no time; "
        "Tensorflow: wait-free with round-robin, its default placement; transfers share a link equally (in a row: "
        "unequally, as the simulator's default)"
    )
    made = Part("Figures 1.1 and 5.4: speedups at four workers", setting)
    for model, by in speeds.items():
        gain = by["wait-free"].speedup / by["traditional"].speedup
        published = paper[f"figure-5.4/wait-free/{model}"]
        made.add(f"{model}, wait-free / traditional", published, gain, published.unit, holds=True)
        uneven = [speed(model, iterations, one, network={}).speedup for one in (WAIT_FREE, TRADITIONAL)]
        gain = uneven[0] / uneven[1]
        made.add("— with unequal shares of links", published, gain, published.unit)
        if model == "resnet":
            free, traditional = (speed(model, iterations, {**one, "bucket": None}) for one in (WAIT_FREE, TRADITIONAL))
            gain = free.speedup / traditional.speedup
            made.add("— with gossipx's default messages, 1 to 4 MiB", published, gain, published.unit)
        top, ssp, every = (by[name].speedup for name in ("wait-free, top-1 %", "wait-free, SSP 5", "all"))
        made.add(f"{model}, all", paper[f"figure-5.4/all/{model}"], every, "times a single machine", holds=True)
        ordered = ssp > top if model == "resnet" else top > ssp
        claim = paper[f"figure-5.4/{model}"]
        made.add(f"{model}, SSP 5 / top-1 %", claim, ssp / top, "", ordered, holds=model == "resnet")
        own = by["wait-free, ssp:5"].speedup
        made.add(
            "— gossipx's ssp:5, which pulls each time", claim, own / top, "", own > top if model == "resnet" else None
        )
        near = by["Tensorflow"].speedup / by["wait-free"].speedup
        made.add(f"{model}, Tensorflow / wait-free", paper["figure-5.4/overhead"], near, "", 0.9 < near < 1.1)
    slower = speeds["inception-v4"]["Tensorflow"].speedup
    made.add("inception-v4, Tensorflow", paper["figure-1.1/inception-v4"], slower, "times a single machine", slower < 1)
    return made


def _scaling(iterations: int, numbers: Sequence[int]) -> Part:
    made = Part("Figure 5.5: scaling of ResNet", "as above; the thesis has four machines, and no numbers")
    for workers in numbers:
        plain = speed("resnet", iterations, WAIT_FREE, workers).speedup
        every = speed("resnet", iterations, {**WAIT_FREE, **TOP}, workers, STALE).speedup
        made.add(f"{workers} workers, wait-free", "a curve of Figure 5.5", plain, "times a single machine")
        near = every > 0.85 * workers
        claim = paper["figure-5.5/scaling"]
        made.add(f"{workers} workers, all", claim, every, "times a single machine", near, holds=True)
    return made


def _utilisation(speeds: dict[str, Speed]) -> Part:
    setting = "as above; GPU: computation / time; network: what a worker receives / what its link carries in the time"
    made = Part("Figure 5.6: utilisation with ResNet", setting)
    for name, one in speeds.items():
        if name == "Tensorflow":
            continue
        made.add(f"{name}, GPU", "a bar of Figure 5.6", one.gpu, "%")
        made.add(f"{name}, network", "a bar of Figure 5.6", one.network, "%")
    plain, free, top, ssp = (
        speeds[name] for name in ("traditional", "wait-free", "wait-free, top-1 %", "wait-free, SSP 5")
    )
    raises = free.gpu > plain.gpu and free.network > plain.network
    made.add("wait-free raises both", paper["figure-5.6/wait-free"], free.network / plain.network, "× network", raises)
    less = max(top.network, ssp.network) < free.network and min(top.gpu, ssp.gpu) > free.gpu
    claim = paper["figure-5.6/compression-and-ssp"]
    made.add("SSP and top-1 %: less network, more GPU", claim, ssp.network / free.network, "× network", less)
    more = ssp.network > top.network and ssp.gpu >= 0.95 * top.gpu
    made.add("SSP / top-1 %: network", paper["figure-5.6/ssp"], ssp.network / top.network, "times", more, holds=False)
    every = speeds["all"]
    both = every.gpu >= 0.99 * max(one.gpu for one in speeds.values()) and every.network <= top.network
    made.add("all: most GPU, least network", paper["figure-5.6/all"], every.network, "%", both, holds=False)
    return made


# --- training -------------------------------------------------------------------------------------


def _accuracy(full: bool, data_dir: str | None, speeds: dict[str, Speed]) -> list[Part]:
    iterations, seeds = (1_200, 3) if full else (60, 1)
    task = {"task": "cifar10", "data_dir": data_dir} if data_dir else {"task": "fashion-mnist"}
    told = "one seed" if seeds == 1 else f"{seeds} seeds"
    setting = (
        f"LeNet on {task['task']}, {iterations} iterations (20,000 in the thesis), {told}, SGD at 0.05 without "
        "momentum (at the thesis's 0.1 SSP diverges), of the mean of the gradients (Algorithm 1 sums them); top-1 % "
        "with error feedback in both directions"
    )
    common: dict[str, dict[str, Any]] = {
        "simulation": {"peers": WORKERS},
        "task": {"model": "lenet", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, **task},
        "compute": {"seconds": seconds_of("resnet"), "spread": JITTER},
        "server": {"servers": "0,1,2,3"},
        "run": {"iterations": iterations, "eval_interval": iterations // POINTS},
        "sync": {"finish": "none"},
    }
    kinds: dict[str, tuple[dict[str, Any], Parts | None]] = {
        "bsp": ({}, None),
        "top-1 %": (TOP, None),
        "SSP 5": ({}, STALE),
        "all": (TOP, STALE),
    }
    made = Part("Figure 5.7: accuracy at equal iterations", setting)
    accuracy, curves = {}, {}
    for name, (server, own) in kinds.items():
        tables = merged(common, {"server": server})
        runs: list[Run] = [run(tables, {"run": {"seed": seed}}, curves=True, parts=own) for seed in range(seeds)]
        accuracy[name] = fmean(one.accuracy for one in runs)
        curves[name] = _curve(runs)
        made.add(f"accuracy, {name}", "a curve of Figure 5.7", accuracy[name], "of 1")
    below = 100 * (accuracy["bsp"] - accuracy["all"])
    made.add("accuracy, bsp − all", paper["figure-5.7/accuracy"], below, "points", 0 < below < SLIGHTLY)
    return [made, _by_time(setting, curves, speeds)]


def _curve(runs: Sequence[Run]) -> dict[int, float]:
    """Return the mean accuracy on test data by iteration."""
    every = [peer["test/accuracy"] for one in runs for peer in one.curves]
    return {step: fmean(peer[step] for peer in every) for step in every[0] if all(step in peer for peer in every)}


def _by_time(setting: str, curves: dict[str, dict[int, float]], speeds: dict[str, Speed]) -> Part:
    """Return the time to the accuracies that both all optimizations and Tensorflow reach."""
    often = (
        f"accuracy is measured {POINTS} times and interpolated; an iteration takes as long as that of ResNet's traffic"
    )
    made = Part("Figure 5.8: accuracy by time", f"{setting}; {often}")
    own, plain = curves["all"], curves["bsp"]
    step = WORKERS * seconds_of("resnet")
    each = {name: step / speeds[speed].speedup for name, speed in (("all", "all"), ("bsp", "Tensorflow"))}
    for share in (0.8, 0.9, 1.0):
        target = share * min(max(own.values()), max(plain.values()))
        taken = [_reached(curve, target) * each[name] for name, curve in (("all", own), ("bsp", plain))]
        percent = 100 * taken[0] / taken[1]
        made.add(f"time to accuracy {target:.2f}, all / Tensorflow", paper["figure-5.8/time-to-accuracy"], percent)
    return made


def _reached(curve: dict[int, float], target: float) -> float:
    """Return the iteration at which a curve reaches a value, on the line between two evaluations."""
    points = sorted(curve.items())  # from iteration 0 on
    number = next(number for number, (_, value) in enumerate(points) if value >= target)
    (before, low), (at, high) = points[number - 1 : number + 1]
    return before + (at - before) * (target - low) / (high - low)


if __name__ == "__main__":
    show(paper, parts, __doc__)
