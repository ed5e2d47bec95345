"""Table 1.1 and Figures 5.1 to 5.8 of the Modularized Parameter Server beside ours, in virtual time.

bin/papers modular-server           40 iterations of traffic; LeNet for 100 iterations
bin/papers modular-server --full    200 iterations of traffic; LeNet for 1,200 iterations, three seeds

Speeds are those of traffic alone, with four workers that are the four servers, too, at 1 Gbit/s. Accuracy is that of LeNet
on Fashion-MNIST, in place of ResNet-110 on CIFAR-10; --data-dir trains on CIFAR-10.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from _simulated import Run, mean, merged, run
from _table import Part, show
from published import Paper

from gossipx.tasks.models import published_sizes

WORKERS = 4
RATE = 1e9 / 8
MODELS = {"resnet": "resnet110", "inception-v4": "inception-v4", "googlenet": "googlenet"}
GOOGLENET = 0.680 * 1.583 / 12.284
"""Seconds: the thesis gives none for GoogLeNet; that of Inception-v4 by multiply-adds."""
TRADITIONAL: dict[str, Any] = {"sync": "bsp", "wait_free": False, "placement": "heuristic"}
WAIT_FREE = {**TRADITIONAL, "wait_free": True}
TOP = {"push_codec": "topk:ratio=0.01", "pull_codec": "topk:ratio=0.01"}
ENCODED = 0.02
"""Of raw values: one in a hundred, as index and value, in both directions (Code 4.2 and 4.3)."""
SSP = {"sync": "ssp:staleness=5"}
JITTER = "log-normal:sigma=0.1"


def parts(paper: Paper, full: bool, arguments: argparse.Namespace) -> Sequence[Part]:
    """Return the tables."""
    iterations = 200 if full else 40
    speeds = {model: _speeds(paper, model, iterations) for model in ("resnet", "inception-v4")}
    return [
        _sizes(paper),
        _placements(paper, iterations),
        _optimizations(paper, speeds),
        _scaling(paper, iterations),
        _utilisation(paper, speeds["resnet"]),
        _accuracy(paper, full, arguments.data_dir),
    ]


# --- traffic --------------------------------------------------------------------------------------


def seconds_of(paper: Paper, model: str) -> float:
    """Return the seconds of an iteration on a single machine."""
    return GOOGLENET if model == "googlenet" else paper.figures[f"derived/{model}/iteration"].value


def traffic(paper: Paper, model: str, iterations: int, server: dict[str, Any], workers: int = WORKERS) -> Run:
    """Run workers that are servers, too."""
    simulation: dict[str, Any] = {"peers": workers, "work": "traffic", "model": MODELS[model]}
    if "push_codec" in server:
        simulation["encoded"] = ENCODED
    tables = {
        "simulation": simulation,
        "run": {"iterations": iterations},
        "server": {"servers": ",".join(map(str, range(workers))), **server},
        "compute": {"seconds": seconds_of(paper, model), "spread": JITTER},
        "network": {"preset": "1gbit"},
    }
    return run(tables)


def speedup(paper: Paper, model: str, found: Run) -> float:
    """Return iterations per second of all workers, relative to a single machine."""
    seconds = mean(found.summary.train_seconds) / found.summary.iterations
    return found.summary.peers * seconds_of(paper, model) / seconds


def _speeds(paper: Paper, model: str, iterations: int) -> dict[str, Run]:
    servers = {
        "traditional": TRADITIONAL,
        "wait-free": WAIT_FREE,
        "wait-free, top-1 %": {**WAIT_FREE, **TOP},
        "wait-free, ssp:5": {**WAIT_FREE, **SSP},
        "all": {**WAIT_FREE, **TOP, **SSP},
    }
    return {name: traffic(paper, model, iterations, server) for name, server in servers.items()}


def _sizes(paper: Paper) -> Part:
    made = Part("Table 1.1: models", "sizes of the models that gossipx has; bits = parameters × 32 × steps per second")
    for column, model in (("resnet", "resnet110"), ("inception-v4", "inception-v4")):
        million = sum(count for _, count in published_sizes(model)) / 1e6
        made.add(f"{column}, parameters", paper.figures[f"table-1.1/parameters/{column}"], million, "million")
        bits = million * 32 * paper.figures[f"table-1.1/steps/{column}"].value
        made.add(f"{column}, bits per second", paper.figures[f"table-1.1/bits/{column}"], bits, "Mbit/s")
    densenet = sum(count for _, count in published_sizes("densenet121")) / 1e6
    made.add("densenet (here DenseNet-121)", paper.figures["table-1.1/parameters/densenet"], densenet, "million")
    return made


def _placements(paper: Paper, iterations: int) -> Part:
    setting = (
        "traffic, bsp, traditional backpropagation; gossipx groups small tensors into messages, which the thesis does"
    )
    made = Part("Figures 5.1 to 5.3: placements, speedup at four workers", f"{setting} not")
    found: dict[str, dict[str, float]] = {}
    for model in MODELS:
        found[model] = {}
        for placement in ("uniform", "round-robin", "heuristic"):
            ran = traffic(paper, model, iterations, {**TRADITIONAL, "placement": placement})
            found[model][placement] = speedup(paper, model, ran)
            made.add(f"{model}, {placement}", "a bar of Figure 5.1", found[model][placement], "times one machine")
    resnet, inception, googlenet = found["resnet"], found["inception-v4"], found["googlenet"]
    claim = paper.claims["figure-5.1/resnet/uniform"]
    made.add(
        "ResNet, uniform / heuristic",
        claim,
        resnet["uniform"] / resnet["heuristic"],
        "",
        resnet["uniform"] < resnet["heuristic"],
    )
    claim = paper.claims["figure-5.1/inception-v4/uniform"]
    best = inception["uniform"] >= max(inception.values())
    made.add("Inception-v4, uniform / heuristic", claim, inception["uniform"] / inception["heuristic"], "", best)
    claim = paper.claims["figure-5.3/round-robin"]
    worst = googlenet["round-robin"] <= min(googlenet.values())
    made.add(
        "GoogLeNet, round-robin / heuristic",
        claim,
        googlenet["round-robin"] / googlenet["heuristic"],
        "",
        worst,
        holds=True,
    )
    return made


def _optimizations(paper: Paper, speeds: dict[str, dict[str, Run]]) -> Part:
    setting = f"traffic, heuristic placement; iterations vary by {JITTER}; top-1 % sends 2 % of the bytes both ways"
    made = Part("Figures 1.1 and 5.4: speedups at four workers", setting)
    for model, runs in speeds.items():
        by = {name: speedup(paper, model, one) for name, one in runs.items()}
        gain = by["wait-free"] / by["traditional"]
        published = paper.figures[f"figure-5.4/wait-free/{model}"]
        made.add(f"{model}, wait-free / traditional", published, gain, "", gain > 1, holds=True)
        every = by["all"] >= max(by.values()) * 0.99
        made.add(
            f"{model}, all", paper.figures[f"figure-5.4/all/{model}"], by["all"], "times one machine", every, holds=True
        )
        top, ssp = by["wait-free, top-1 %"], by["wait-free, ssp:5"]
        ordered = ssp > top if model == "resnet" else top > ssp
        claim = paper.claims[f"figure-5.4/{model}"]
        made.add(f"{model}, ssp:5 / top-1 %", claim, ssp / top, "", ordered, holds=model == "inception-v4")
    slower = speedup(paper, "inception-v4", speeds["inception-v4"]["traditional"])
    claim = paper.claims["figure-1.1/inception-v4"]
    made.add("Inception-v4, traditional", claim, slower, "times one machine", slower < 1, holds=True)
    return made


def _scaling(paper: Paper, iterations: int) -> Part:
    made = Part("Figure 5.5: scaling of ResNet", "traffic; the thesis has four machines, and no numbers")
    for workers in (1, 2, 4, 8, 16):
        plain = traffic(paper, "resnet", iterations, WAIT_FREE, workers)
        every = traffic(paper, "resnet", iterations, {**WAIT_FREE, **TOP, **SSP}, workers)
        best = speedup(paper, "resnet", every)
        made.add(f"{workers} workers, wait-free", "", speedup(paper, "resnet", plain), "times one machine")
        near = best > 0.9 * workers
        made.add(
            f"{workers} workers, all", paper.claims["figure-5.5/scaling"], best, "times one machine", near, holds=True
        )
    return made


def _utilisation(paper: Paper, runs: dict[str, Run]) -> Part:
    setting = (
        "traffic; GPU: computation / time; network: bytes that a worker receives / what its link carries in the time"
    )
    made = Part("Figure 5.6: utilisation with ResNet", setting)
    gpu, network = {}, {}
    for name, one in runs.items():
        seconds = mean(one.summary.train_seconds)
        gpu[name] = 100 * one.summary.iterations * seconds_of(paper, "resnet") / seconds
        network[name] = 100 * mean(one.summary.bytes_received) / (RATE * seconds)
        made.add(f"{name}, GPU", "a bar of Figure 5.6", gpu[name], "%")
        made.add(f"{name}, network", "a bar of Figure 5.6", network[name], "%")
    raises = gpu["wait-free"] > gpu["traditional"] and network["wait-free"] > network["traditional"]
    made.add(
        "wait-free raises both", paper.claims["figure-5.6/wait-free"], gpu["wait-free"], "% GPU", raises, holds=True
    )
    both = gpu["all"] > gpu["wait-free"] and network["all"] < network["wait-free"]
    made.add(
        "all: more GPU, less network", paper.claims["figure-5.6/all"], network["all"], "% network", both, holds=True
    )
    more = network["wait-free, ssp:5"] > network["wait-free, top-1 %"]
    claim = paper.claims["figure-5.6/ssp"]
    made.add("SSP: more network than top-1 %", claim, network["wait-free, ssp:5"], "% network", more, holds=True)
    return made


# --- training -------------------------------------------------------------------------------------


def _accuracy(paper: Paper, full: bool, data_dir: str | None) -> Part:
    iterations, seeds = (1_200, 3) if full else (100, 1)
    task = {"task": "cifar10", "data_dir": data_dir} if data_dir else {"task": "fashion-mnist"}
    setting = (
        f"LeNet on {task['task']}, {iterations} iterations, {seeds} seeds, SGD at 0.1 without momentum, error feedback"
    )
    made = Part("Figures 5.7 and 5.8: accuracy", setting)
    common = {
        "simulation": {"peers": WORKERS},
        "task": {"model": "lenet", "base_lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, **task},
        "compute": {"seconds": paper.figures["derived/resnet/iteration"].value, "spread": JITTER},
        "server": {"servers": "0,1,2,3"},
    }
    kinds: dict[str, dict[str, Any]] = {"bsp": {}, "top-1 %": TOP, "ssp:5": SSP, "all": {**TOP, **SSP}}
    accuracy = {}
    for name, server in kinds.items():
        runs = [
            run(merged(common, {"server": server, "run": {"iterations": iterations, "seed": seed, "eval_interval": 0}}))
            for seed in range(seeds)
        ]
        accuracy[name] = fmean(one.accuracy for one in runs)
        made.add(f"accuracy, {name}", "a curve of Figure 5.7", accuracy[name], "of 1")
    claim = paper.claims["figure-5.7/accuracy"]
    lower = accuracy["all"] <= accuracy["bsp"] + 0.01
    made.add("all − bsp, equal iterations", claim, accuracy["all"] - accuracy["bsp"], "of 1", lower, holds=True)
    return made


if __name__ == "__main__":
    show("modular-server", parts, __doc__ or "", ["--data-dir"])
