"""Figures 6 to 11, Table IV and the bounds of regret of FluentPS beside ours, in virtual time.

bin/papers fluentps           an MLP on random data with up to 16 workers; traffic of ResNet-56 with 8 and 16
bin/papers fluentps --full    LeNet on Fashion-MNIST with up to 128 workers; traffic with 8 to 32 (about three hours)

The stragglers of the paper are not known. Here one worker is slower, by as much as SSP is slower than ASP in Table IV;
two other kinds stand beside it. The paper trains with LARS, and we with SGD. --data-dir trains LeNet on CIFAR-10.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import _regret
import torch
from _bench.cli import Given
from _bench.simulated import run
from _bench.tasks import clouds, images
from _table import Part, show
from _workers import Outcome, Problem, Stale, train
from published import Figure, read

from gossipx.parts import Parts

paper = read("fluentps")
SECONDS = 1.0
"""Of an iteration of an ordinary worker; times are relative to ASP's."""
COLUMNS = {
    "asp": ("asp", "lazy"),
    "bsp": ("bsp", "lazy"),
    **{
        f"{pulls}/{name}": (sync, pulls)
        for pulls in ("soft", "lazy")
        for name, sync in {
            "pssp:0.1": "pssp:staleness={s},p=0.1",
            "pssp:0.3": "pssp:staleness={s},p=0.3",
            "pssp:0.5": "pssp:staleness={s},p=0.5",
            "ssp": "ssp:staleness={s}",
            "dynamic": "pssp:staleness={s},alpha=1",
        }.items()
    },
}
"""Sync model and kind of pulls by column of Table IV, which has no bsp; α = 1 is chosen."""
NOISE = 0.2
"""Points of accuracy."""
STALENESS = 3
PAIRS = {2: 4, 3: 5, 5: 7, 10: 12}
"""s' of the SSP with the same bound of regret, by 1/c of the PSSP with s = 3 (Figure 9)."""


def parts(given: Given) -> Iterator[Part]:
    """Yield the tables."""
    full = given.full
    yield _regret.part(*given.of((2, 5), (8, 60), (16, 400)))
    if given.smoke:
        return
    real = full or bool(given.data_dir)
    problem = _lenet(given.data_dir) if real else _mlp()
    alexnet = _Block("alexnet", 1, 3, 1.76, *((64, 400) if full else (16, 40)))
    columns = list(COLUMNS) if full else [name for name in COLUMNS if not name.endswith(":0.3")]
    yield _communication((8, 16, 32) if full else (8, 16))
    numbers, iterations = ((2, 4, 8, 16, 64), 400) if full else ((2, 16), 60)
    yield _baseline(problem if real else _mlp(1.0), numbers, iterations)
    yield _table_4(problem, alexnet, columns)
    if full:
        yield _table_4(_mlp(), _Block("resnet56", 8, 2, 1.23, 32, 100), columns)
    yield _stragglers(problem, alexnet, full)
    yield _pairs(_mlp(), *((64, 200, PAIRS) if full else (16, 40, {10: 12})))
    if full:
        yield _many(problem)


# --- Figure 6 -------------------------------------------------------------------------------------


def _communication(numbers: Sequence[int]) -> Part:
    setting = (
        "traffic of ResNet-56, bsp, 8 servers on machines of their own, 0.625 Gbit/s each (25 Gbit/s / 40, chosen),"
        " equal shares of links; computation of 0.37 s with 32 workers, chosen, and more in proportion with fewer, as"
        " the batch is 4,096 images of all; a worker waits for all values, then computes, then sends; PS-Lite: ranges"
        " of keys, and no pull is answered before all servers have all pushes; gossipx's default: heuristic placement;"
        " values are received while the forward pass computes, and gradients sent while the backward pass does"
    )
    made = Part("Figure 6: communication of an iteration", setting)
    kinds: dict[str, dict[str, Any]] = {
        "as PS-Lite": {"wait_free": False, "placement": "range", "overlap": False},
        "overlapped": {"wait_free": False, "placement": "range"},
        "overlapped and sliced": {"wait_free": False, "placement": "sliced"},
        "gossipx's default": {},
        "wait-free, in messages of 256 KiB": {"placement": "sliced", "bucket": 2**18},
    }
    whole: dict[tuple[int, str], tuple[float, float]] = {}
    for workers in numbers:
        step = 0.37 * 32 / workers
        for name, server in kinds.items():
            seconds = [_slowest(workers, step, server, each) for each in (1, 3)]
            each = (seconds[1] - seconds[0]) / 2
            whole[workers, name] = each, each - step
            made.add(f"{workers} workers, {name}: communication", "a bar of Figure 6", each - step, "s")
    for workers in numbers:
        lite, overlapped, sliced, *_ = (whole[workers, name] for name in kinds)
        computing = lite[0] - lite[1]
        figure = paper["derived/figure-6/communication"]
        times = lite[1] / computing
        made.add(f"{workers} workers, as PS-Lite: communication", figure, times, figure.unit, none=0.0)
        for new, old, name in ((overlapped, lite, "overlapped"), (sliced, overlapped, "sliced")):
            saved = 100 * (1 - new[1] / old[1])
            made.add(f"{workers} workers, {name}: saved", paper[f"figure-6/{name}/communication-saved"], saved)
            faster = old[0] / new[0]
            made.add(f"{workers} workers, {name}: speedup", paper[f"figure-6/{name}/speedup"], faster)
        saved = 100 * (1 - sliced[1] / lite[1])
        made.add(f"{workers} workers, both: saved", paper["abstract/communication-saved"], saved)
        faster = lite[0] / sliced[0]
        made.add(f"{workers} workers, both: speedup", paper["abstract/speedup"], faster)
    first, last = (whole[workers, "as PS-Lite"][1] for workers in (numbers[0], numbers[-1]))
    claim = paper["figure-6/communication"]
    made.add(f"PS-Lite, {numbers[-1]} / {numbers[0]} workers", claim, last / first, "×", last > first, holds=True)
    return made


def _slowest(workers: int, step: float, server: dict[str, Any], iterations: int) -> float:
    tables: dict[str, dict[str, Any]] = {
        "simulation": {"peers": workers + 8, "work": "traffic", "model": "resnet56"},
        "run": {"iterations": iterations},
        "server": {"servers": "0,1,2,3,4,5,6,7", "servers_only": True, **server},
        "compute": {"seconds": step, **({} if server.get("wait_free", True) else {"forward": 0.0})},
        "network": {"up": "625mbit", "down": "625mbit", "uneven": 0.0},
    }
    summary = run(tables).summary
    return max(seconds or 0.0 for seconds in summary.of_training(summary.train_seconds))


# --- problems -------------------------------------------------------------------------------------


def _mlp(rate: float = 0.1) -> Problem:
    name = f"MLP of 20, 64 and 10 units, random clouds, rate {rate:g}"
    return Problem(name, clouds(0), 32, lambda parameters: torch.optim.SGD(parameters, lr=rate))


def _lenet(data_dir: str | None) -> Problem:
    task = images("cifar10", data_dir) if data_dir else images()
    name = f"LeNet, {'CIFAR-10' if data_dir else 'Fashion-MNIST'}"
    return Problem(name, task, 32, lambda parameters: torch.optim.SGD(parameters, lr=0.05))


def slower(factor: float) -> Callable[[int], Callable[[], float]]:
    """Return the times of workers of which the first is always slower."""
    return lambda worker: lambda: SECONDS * (factor if worker == 0 else 1.0)


def in_turn(workers: int, factor: float, turn: int = 10) -> Callable[[int], Callable[[], float]]:
    """Return the times of workers of which a quarter is slower at a time, each for ``turn`` iterations."""

    def of(worker: int) -> Callable[[], float]:
        done = 0

        def seconds() -> float:
            nonlocal done
            done += 1
            return SECONDS * (factor if done // turn % min(workers, 4) == worker % 4 else 1.0)

        return seconds

    return of


def varied(sigma: float = 0.3) -> Callable[[int], Callable[[], float]]:
    """Return log-normal times of mean 1."""

    def of(worker: int) -> Callable[[], float]:
        rng = random.Random(worker)
        return lambda: SECONDS * rng.lognormvariate(-(sigma**2) / 2, sigma)

    return of


# --- Figure 7 -------------------------------------------------------------------------------------


def _baseline(problem: Problem, numbers: Sequence[int], iterations: int) -> Part:
    batch = 32 * numbers[-1]
    setting = (
        f"{problem.name}, {iterations} iterations (4,000 in the paper), a batch of {batch} images of all workers "
        "(6,400), times log-normal with sigma 0.3; SSPtable is read in two ways: a worker pulls only tables that are "
        "too old, and gradients are also applied without division by the number of workers; SGD in place of LARS, "
        "with the MLP at FluentPS's best rate of 0.1, 0.3 and 1"
    )
    made = Part("Figure 7: accuracy with SSPtable, s = 3", setting)
    kinds: dict[str, tuple[dict[str, Any], Parts | None]] = {
        "FluentPS": ({"sync": "ssp:staleness=3"}, None),
        "old tables": ({"sync": "bsp"}, Parts(sync=Stale(STALENESS))),
        "old tables, whole gradients": ({"sync": "bsp", "apply": "each"}, Parts(sync=Stale(STALENESS))),
    }
    found: dict[tuple[str, int], float] = {}
    for workers in numbers:
        problem.batch = batch // workers
        for name, (settings, own) in kinds.items():
            done = train(problem, workers, 1, iterations, varied(), parts=own, **settings)
            found[name, workers] = 100 * done.accuracy(problem.task)
            published = "a curve of Figure 7"
            if workers == numbers[-1]:
                which = "fluentps" if name == "FluentPS" else "ssptable"
                least, most = (paper[f"figure-7/{which}/{end}"].value for end in ("least", "most"))
                published = f"{least:g} to {most:g} % with 64 workers (Figure 7)"
            made.add(f"{name}, {workers} workers", published, found[name, workers], "%")
    problem.batch = 32
    few, many = numbers[0], numbers[-1]
    lost = found["FluentPS", few] - found["FluentPS", many]
    claim = paper["figure-7/fluentps"]
    made.add(f"FluentPS loses accuracy from {few} to {many} workers", claim, lost, "points", lost < 3, holds=True)
    for name in list(kinds)[1:]:
        below = found["FluentPS", many] - found[name, many]
        apart = paper["figure-7/fluentps/least"].value - paper["figure-7/ssptable/most"].value
        told = Figure("", apart, "points", "Figure 7, with 64 workers", "at least")
        made.add(f"FluentPS − {name}, {many} workers", told, below, "points")
        for workers in (one for one in numbers if one in (2, 4)):
            above = found["FluentPS", workers] - found[name, workers]
            made.add(f"FluentPS − {name}, {workers} workers", paper[f"figure-7/difference/{workers}-workers"], above)
    return made


# --- Table IV, Figures 8 to 11 --------------------------------------------------------------------


class _Block:
    """A block of Table IV: the paper's model, its servers, s, how much slower the straggler is, workers, iterations."""

    def __init__(self, model: str, servers: int, staleness: int, factor: float, workers: int, iterations: int):
        self.model, self.servers, self.staleness, self.factor = model, servers, staleness, factor
        self.workers, self.iterations = workers, iterations

    def train(self, problem: Problem, column: str, times: Callable[[int], Callable[[], float]]) -> Outcome:
        """Train with the sync model of a column."""
        sync, pulls = COLUMNS[column]
        sync = sync.format(s=self.staleness)
        return train(
            problem,
            self.workers,
            self.servers,
            self.iterations,
            times,
            sync=sync,
            pulls=pulls,
            placement="sliced",
        )


def _table_4(problem: Problem, block: _Block, columns: Sequence[str]) -> Part:
    asked = paper.setting["table-4"][block.model]
    setting = (
        f"{problem.name} for {block.model}; {block.workers} workers ({asked['workers']} in the paper), {block.servers} "
        f"servers, s = {block.staleness}, {block.iterations} iterations ({asked['iterations']:,} in the paper), "
        f"{problem.batch} images per worker ({asked['batch_size'] // asked['workers']}), one worker always "
        f"{block.factor} times as slow, which is the paper's time of SSP with the soft barrier, so that ours tends to "
        "it; alpha = 1; SGD in place of LARS; one seed; the paper's DPRs are taken to be of all pulls of 100 iterations"
    )
    made = Part(f"Table IV and Figures 8 and 10: {block.model}, CIFAR-10", setting)
    found = {column: block.train(problem, column, slower(block.factor)) for column in columns}

    def published(row: str, column: str) -> Figure | None:
        return paper.figures.get(f"table-4/{block.model}/cifar-10/{row}/{column}")

    most = block.workers * block.servers * block.iterations
    paper_most = 100 * asked["workers"] * block.servers
    for column, one in found.items():
        dprs = published("dprs", column)
        told: Figure | str = "not given"
        if dprs:
            place = f"Table IV: {dprs.value:g} of {paper_most}"
            told = Figure("", 100 * dprs.value / paper_most, "% of the pulls", place)
        made.add(f"{column}: DPRs", told, 100 * one.dprs / most, "% of the pulls")
    for column, one in found.items():
        time, of = published("time", column), published("time", "asp")
        told = Figure("", time.value / of.value, "× ASP's", "Table IV") if time and of else "not given"
        made.add(f"{column}: time", told, one.seconds / found["asp"].seconds, "× ASP's")
    accuracy = {column: one.accuracy(problem.task) for column, one in found.items()}
    for column, value in accuracy.items():
        made.add(f"{column}: accuracy", published("accuracy", column) or "not given", value, "of 1")
    _directions(made, block.model, found, accuracy)
    return made


def _directions(made: Part, model: str, found: dict[str, Outcome], accuracy: dict[str, float]) -> None:
    """Add what the paper concludes from Table IV."""
    dprs = {column: one.dprs for column, one in found.items()}
    seconds = {column: one.seconds for column, one in found.items()}

    def published(row: str, column: str) -> float:
        return paper[f"table-4/{model}/cifar-10/{row}/{column}"].value

    soft = [dprs[f"soft/{name}"] for name in ("pssp:0.1", "pssp:0.3", "pssp:0.5", "ssp") if f"soft/{name}" in dprs]
    rising = soft == sorted(soft) and len(set(soft)) == len(soft)
    what = f"{model}, soft barrier: PSSP has fewer DPRs"
    made.add(what, "Table IV", soft[0] / soft[-1], "of SSP's", rising, holds=True)
    for what, less, more, holds in (
        ("SSP: DPRs saved by lazy pulls", "lazy/ssp", "soft/ssp", True),
        ("lazy: DPRs saved by PSSP 0.1", "lazy/pssp:0.1", "lazy/ssp", False),
    ):
        saved = 100 * (1 - dprs[less] / dprs[more])
        theirs = 100 * (1 - published("dprs", less) / published("dprs", more))
        made.add(f"{model}, {what}", Figure("", theirs, "%", "Table IV"), saved, "%", holds=holds)
    for what, slow, fast in (
        ("SSP: lazy pulls are faster", "soft/ssp", "lazy/ssp"),
        ("PSSP 0.5 is faster than SSP, soft", "soft/ssp", "soft/pssp:0.5"),
    ):
        gain = seconds[slow] / seconds[fast]
        theirs = published("time", slow) / published("time", fast)
        made.add(f"{model}, {what}", Figure("", theirs, "×", "Table IV"), gain, "×")
    for what, fewer in (("SSP, lazy", "lazy/ssp"), ("PSSP 0.1, lazy", "lazy/pssp:0.1")):
        times = dprs["soft/ssp"] / dprs[fewer]
        figure = paper["abstract/dprs"]
        if (model, fewer) != ("resnet56", "lazy/ssp"):
            theirs = published("dprs", "soft/ssp") / published("dprs", fewer)
            figure = Figure("", theirs, figure.unit, "Table IV")
        made.add(f"{model}: DPRs of SSP, soft / {what}", figure, times, figure.unit)
    apart = 100 * max(abs(accuracy[name] - accuracy["soft/ssp"]) for name in accuracy if name.startswith("soft/pssp"))
    made.add(f"{model}, soft: PSSP's accuracy is near SSP's", paper["figure-10/ssp"], apart, "points", apart < 1)
    claim = paper["figure-10/asp"]
    fastest = seconds["asp"] <= min(seconds.values())
    made.add(f"{model}, ASP is fastest", claim, seconds["asp"] / min(seconds.values()), "× the least", fastest)
    others = {column: value for column, value in accuracy.items() if column not in ("asp", "bsp")}
    below = 100 * (min(others.values()) - accuracy["asp"])
    theirs = 100 * (min(published("accuracy", column) for column in others) - published("accuracy", "asp"))
    told = f"{theirs:.1f} points in Table IV"
    claimed = model == "alexnet"  # section IV-B4 says it of AlexNet, against Table IV
    if claimed:
        told = f"“{claim.says}”; but {told}"
    made.add(f"{model}, ASP is the least accurate, by", told, below, "points", below > NOISE if claimed else None)
    gain = 100 * (accuracy["soft/pssp:0.5"] - accuracy["asp"])
    theirs = 100 * (published("accuracy", "soft/pssp:0.5") - published("accuracy", "asp"))
    made.add(f"{model}, soft: PSSP 0.5 − ASP", Figure("", theirs, "points", "Table IV"), gain, "points")


def _stragglers(problem: Problem, block: _Block, full: bool) -> Part:
    """Return how the results depend on the stragglers, which the paper does not give."""
    setting = f"as Table IV's {block.model}; in turn: a quarter of the workers at a time, for 10 iterations; varied: "
    setting += "log-normal with sigma 0.3"
    made = Part("Table IV with other stragglers: SSP", setting)
    kinds = {"in turn": in_turn(block.workers, block.factor), **({"varied": varied()} if full else {})}
    for name, times in kinds.items():
        asp, soft, lazy = (block.train(problem, column, times) for column in ("asp", "soft/ssp", "lazy/ssp"))
        saved = 100 * (1 - lazy.dprs / soft.dprs) if soft.dprs else 0.0
        gain = soft.seconds / lazy.seconds
        for what, value, unit, theirs in (
            ("soft / ASP, time", soft.seconds / asp.seconds, "×", 1.76),
            ("DPRs saved by lazy pulls", saved, "%", 91.6),
            ("lazy pulls are faster", gain, "×", 1.25),
        ):
            made.add(f"{name}: {what}", Figure("", theirs, unit, "Table IV"), value, unit)
    return made


def _pairs(problem: Problem, workers: int, iterations: int, pairs: dict[int, int]) -> Part:
    setting = (
        f"{problem.name}, {workers} workers, 1 server, {iterations} iterations (4,000 in the paper), one worker always "
        "1.76 times as slow; each pair has the same bound of regret"
    )
    made = Part("Figure 9: PSSP with s = 3 beside SSP with s' = s + 1/c − 1", setting)
    scale = 100 / iterations
    for inverse, other in pairs.items():
        found: dict[str, list[Outcome]] = {}
        for pulls in ("soft", "lazy"):
            models = (f"pssp:staleness=3,p={1 / inverse:g}", f"ssp:staleness={other}")
            found[pulls] = [
                train(problem, workers, 1, iterations, slower(1.76), sync=sync, pulls=pulls) for sync in models
            ]
            pssp, ssp = found[pulls]
            name = f"{pulls}, c = 1/{inverse}, s' = {other}"
            made.add(f"{name}: DPRs of SSP", "a bar of Figure 9", ssp.dprs * scale, "per 100")
            made.add(f"{name}: DPRs of PSSP", "a bar of Figure 9", pssp.dprs * scale, "per 100")
            saved = 100 * (1 - pssp.dprs / ssp.dprs) if ssp.dprs else 0.0
            figure = paper[f"figure-9/pssp/{pulls}/dprs-saved"]
            made.add(f"{name}: DPRs saved by PSSP", figure, saved, figure.unit, holds=pulls == "soft")
            saved = 100 * (1 - pssp.seconds / ssp.seconds)
            figure = paper["figure-9/pssp/soft/time-saved"]
            told = figure if pulls == "soft" else "a bar of Figure 9"
            made.add(f"{name}: time saved by PSSP", told, saved, figure.unit)
        soft, lazy = found["soft"], found["lazy"]
        name = f"SSP, s' = {other}"
        saved = 100 * (1 - lazy[1].dprs / soft[1].dprs) if soft[1].dprs else 0.0
        figure = paper["figure-9/lazy/dprs-saved"]
        made.add(f"{name}: DPRs saved by lazy pulls", figure, saved, figure.unit)
        gain, figure = soft[1].seconds / lazy[1].seconds, paper["figure-9/lazy/speedup"]
        made.add(f"{name}: lazy pulls are faster", figure, gain, figure.unit)
        shorter = lazy[0].seconds / soft[0].seconds
        claim = paper["figure-9/soft-sometimes-shorter"]
        made.add(f"PSSP, c = 1/{inverse}: time of lazy / soft", claim, shorter, "", shorter > 1)
    return made


def _many(problem: Problem) -> Part:
    """Return Figure 11."""
    made = Part(
        "Figure 11: accuracy of 128 workers",
        f"{problem.name}, 8 servers, s = 3, 200 iterations (4,000 in the paper), one seed",
    )
    block = _Block("alexnet", 8, 3, 1.76, 128, 200)
    found: dict[str, float] = {}
    for column in ("asp", "soft/pssp:0.3", "soft/pssp:0.5"):
        found[column] = 100 * block.train(problem, column, slower(1.76)).accuracy(problem.task)
        made.add(column, "a curve of Figure 11", found[column], "%")
    for column in list(found)[1:]:
        gain = found[column] - found["asp"]
        made.add(f"{column} − ASP", paper["figure-11/pssp/accuracy"], gain)
    return made


if __name__ == "__main__":
    show(paper, parts, __doc__)
