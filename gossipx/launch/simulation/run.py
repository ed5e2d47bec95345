"""A simulated run: its peers in a world, its faults, its progress, and the directory that it leaves."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import math
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from gossipx.assembly.presets import effective_config
from gossipx.assembly.server import Parts
from gossipx.errors import DIFFERENT_MODELS, GossipxError, NotEnoughPeersError, UsageError
from gossipx.launch.directory import RunDirectory
from gossipx.launch.run.results import sum_up
from gossipx.launch.simulation.peers import Disks, RealPeers, TrafficPeers
from gossipx.launch.simulation.plan import Plan, network_of, plan_of
from gossipx.launch.simulation.reports import SimReporter, consensus, curves_of, peer_recorder
from gossipx.metrics.aggregate import Aggregate
from gossipx.metrics.recorder import Recorder
from gossipx.metrics.summary import Summary
from gossipx.settings.modes import Waves
from gossipx.settings.scenario import MANY, PlannedFault, Scenario
from gossipx.settings.sections import RunConfig
from gossipx.sim import SimPeer, World
from gossipx.sim.base import BasePeer
from gossipx.sim.traffic import TrafficPeer

log = logging.getLogger("gossipx")

UPDATE = 0.2
"""Seconds between two updates of the progress bar."""
FIRST = 100
"""Events before the first one; an event may be a gradient or a message."""
SHOWN = 8
"""Warnings of peers that are printed at the end, one for each topic."""
STALLED = 1_000_000
"""Events without a finished iteration after which a run is given up: it would not end."""
OF_PEER, ALL_TO_ALL = 1_000, 40
"""Further such events for each peer, and for each pair of peers that announce themselves or send each other codes in a
wave: these have 11 before the first iteration, and 14 in a wave."""


def simulate(scenario: Scenario, name: str, parts: Parts | None = None) -> int:
    """Run a scenario.

    Args:
        name: of the run, unless the scenario or the command line names it.
        parts: custom parts of a parameter server, which no scenario can name.

    Returns:
        The exit code.

    Raises:
        UsageError: settings exclude each other, or the name of the run is in use; nothing was run.
        GossipxError: the run did not end, or its figures cannot be written.
    """
    of = scenario.simulation
    try:
        config = effective_config(scenario.config, of.peers, has_script=of.work == "traffic", model=of.model)
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, name=_name_of(config, name)))
        plan = plan_of(scenario, config, parts or Parts())
        disks = Disks(_checkpoint_interval(config))
        make = TrafficPeers(plan) if of.work == "traffic" else RealPeers(plan, disks)
    except UsageError as error:
        raise UsageError(str(error), scenario.path) from None
    if of.announcements is None and of.peers > MANY and not plan.assembled:
        costs = "each peer announces itself to each other, which takes long"
        print(f'{of.peers} peers: {costs}; with gossip or waves, finish = "none" avoids it', file=sys.stderr)
    hosts = "".join(f"{name} name={name}\n" for name in plan.names)
    directory = RunDirectory(config, hosts.encode(), scenario=scenario.text)
    try:
        return _Simulation(plan, directory, make, disks).go()
    finally:
        gc.unfreeze()  # a process may run several
        directory.release()


def _checkpoint_interval(config: RunConfig) -> int:
    """Return the iterations between two checkpoints; 0: no checkpoints."""
    every = str(config.run.checkpoint_every)
    if not every.isdigit():
        raise UsageError(f"checkpoint_every is {every}: a simulated run counts iterations, such as 500")
    return int(every)


def _name_of(config: RunConfig, name: str) -> str:
    """Return the name of a run: the given one, or the scenario's, with a number if taken and not to be overwritten."""
    if config.run.name is not None or config.run.overwrite:
        return config.run.name or name
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if not (Path(config.run.logdir) / one).exists())


def _listed(names: Sequence[str]) -> str:
    """Return the first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "")


class _Simulation:
    """One run, from its start to its summary."""

    def __init__(self, plan: Plan, directory: RunDirectory, make: Callable[[int, int], BasePeer], disks: Disks):
        self._plan = plan
        self._directory = directory
        self._make = make
        self._disks = disks
        seed = plan.config.run.seed
        self._world: World[BasePeer] = World(seed, network_of(plan.scenario.network, plan.size, seed))
        self._curves: Aggregate | None = curves_of(plan, directory.path, lambda: self._world.now)
        self._recorders: list[Recorder] = []
        self._crashes: Counter[int] = Counter()  # by rank, as the next two
        self._restarts: Counter[int] = Counter()
        self._lost_iterations: Counter[int] = Counter()
        self._churned = False  # whether churn let a peer crash
        self._without_effect: defaultdict[tuple[str, float], list[int]] = defaultdict(list)  # ranks by fault, so far
        self._began = math.inf  # when the first process that was replaced began to train

    def go(self) -> int:
        """Run to the end, or until a signal; return the exit code."""
        interrupted, given_up = False, None
        try:
            self._prepare()
            self._run()
        except KeyboardInterrupt:
            interrupted = True
        except GossipxError as error:
            given_up = error
        if all(peer.trained[0] is None for peer in self._world.peers.values()):
            self._directory.revert()
            if given_up is not None:
                raise given_up
            print("stopped before the training began" if interrupted else "no peer trained", file=sys.stderr)
            return 130 if interrupted else 1
        summary = self._sum_up()
        self._directory.keep()
        if self._curves is not None:
            self._curves.write(summary.iterations)
            self._curves.conclude(summary)
            self._curves.close()
        self._directory.conclude(summary)
        code = self._tell(summary, interrupted)
        if given_up is not None:
            raise given_up
        return code

    def _prepare(self) -> None:
        """Schedule the starts of the peers, and the faults."""
        for rank in range(self._plan.size):
            self._world.start(rank, self._maker(rank), self._plan.late.get(rank, 0.0))
        for fault in self._plan.scenario.faults:
            self._schedule(fault)
        self._schedule_churn()

    def _maker(self, rank: int) -> Callable[[int], BasePeer]:
        def make(number: int) -> BasePeer:
            peer = self._make(rank, number)
            if number:
                self._restarts[rank] += 1
            before = self._world.peers.get(rank)
            if before is not None and before.trained[0] is not None:
                self._began = min(self._began, before.trained[0])
            self._record(peer, number)
            return peer

        return make

    def _record(self, peer: BasePeer, number: int) -> None:
        if peer.rank >= self._plan.scenario.simulation.recorded and isinstance(peer, TrafficPeer):
            peer.report_every = self._plan.config.run.log_interval  # only the mean of all peers has its curves
        recorder = peer_recorder(self._plan, self._directory.path, peer.rank, number, lambda: self._world.now)
        peer.reporter_of = lambda: SimReporter(self._plan, peer, recorder, self._curves, self._world)
        self._recorders.append(recorder)

    # --- faults -------------------------------------------------------------------------------------

    def _schedule(self, fault: PlannedFault) -> None:
        world, end = self._world, math.inf if fault.until is None else fault.until
        if fault.kind == "partition":
            others = set(range(self._plan.size)) - set(fault.ranks)
            world.network.cut(fault.ranks, others, fault.at, end, fault.one_way)
        for rank in fault.ranks:
            if fault.kind != "late":
                self._watch(fault, rank)
            match fault.kind:
                case "crash":
                    self._crash(rank, fault.at, end, fault.state == "lost")
                case "pause":
                    world.pause(rank, fault.at, end)
                case "leave":
                    world.leave(rank, fault.at)

    def _watch(self, fault: PlannedFault, rank: int) -> None:
        """See whether a peer runs when a fault comes."""
        ranks = self._without_effect[fault.kind, fault.at]
        ranks.append(rank)

        def comes() -> None:
            peer = self._world.peers.get(rank)
            if peer is not None and peer.down_since is None:
                ranks.remove(rank)

        self._world.at(fault.at, comes)

    def _crash(self, rank: int, at: float, again: float, lost: bool) -> None:
        """Let a peer crash, unless it has ended by then, and start it again."""

        def crash() -> None:
            peer = self._world.peers[rank]
            if peer.down_since is not None:
                return
            self._crashes[rank] += 1
            if peer.trained[0] is not None:
                kept = 0 if lost or again == math.inf else self._disks.iteration(rank)
                self._lost_iterations[rank] += peer.step - max(peer.began, kept)
            self._world.crash(rank, at)
            if again < math.inf:
                if lost:
                    self._world.at(again, lambda: self._disks.lost.add(rank))
                self._world.restart(rank, again, lambda: self._is_over_without(rank))

        self._world.at(at, crash)

    def _is_over_without(self, rank: int) -> bool:
        """Return whether all other peers have ended or crashed, and not all of them crashed."""
        others = [peer for other, peer in self._world.peers.items() if other != rank]
        return any(peer.report for peer in others) and all(peer.down_since is not None for peer in others)

    def _schedule_churn(self) -> None:
        """Let peers crash at random times, exponentially distributed, as long as the run lasts."""
        churn = self._plan.scenario.churn
        if not churn.rate:
            return
        for rank in range(self._plan.size):
            rng = random.Random(f"churn {self._plan.config.run.seed} {rank}")
            self._next_crash(rank, 0.0, rng)

    def _next_crash(self, rank: int, since: float, rng: random.Random) -> None:
        churn = self._plan.scenario.churn
        at = since + rng.expovariate(churn.rate / 60)
        down = rng.expovariate(1 / churn.downtime) if churn.downtime else math.inf

        def crash() -> None:
            peer = self._world.peers.get(rank)
            if peer is not None and (peer.report or peer.trained[1] is not None):
                return  # it has trained to the end, or left
            if peer is not None:  # None: it starts late; one that is down does not crash, but may again later
                self._churned = self._churned or peer.down_since is None
                self._crash(rank, at, at + down, churn.state == "lost")
            if down < math.inf:
                self._next_crash(rank, at + down, rng)

        self._world.at(at, crash)

    # --- progress -----------------------------------------------------------------------------------

    def _run(self) -> None:
        world = self._world
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[at]}"),
            TimeRemainingColumn(),
        )
        stalled, before, batch, size = 0, 0, FIRST, self._plan.size
        all_to_all = not self._plan.assembled or isinstance(self._plan.config.mode, Waves)
        most = STALLED + OF_PEER * size + ALL_TO_ALL * all_to_all * size**2
        updated = time.monotonic()
        gc.collect()
        gc.freeze()  # the peers live as long as the run: no collection needs to look at them
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            shown = bar.add_task(str(self._plan.config.run.name), total=self._plan.size, at="")
            while world.advance(batch):
                done = sum(peer.step for peer in world.peers.values())
                used = (peer.used for peer in world.peers.values())
                completed = sum(part / whole if whole else 1.0 for part, whole in used)
                bar.update(shown, completed=completed, at=f"{world.now:.1f} s of virtual time")
                stalled = stalled + batch if done == before else 0
                before = done
                now = time.monotonic()
                batch = min(2 * batch, 1 + int(batch * UPDATE / max(now - updated, 1e-3)))
                updated = now
                if stalled >= most:
                    problem = f"no iteration was completed in the last {stalled} events"
                    raise GossipxError(
                        f"given up at {world.now:.0f} s: {problem}, and {self._unended()} have not ended"
                    )
                if self._curves is not None:
                    self._curves.write(min((p.step for p in world.peers.values() if p.down_since is None), default=0))
        if not world.over:
            raise GossipxError(f"the run does not end: {self._unended()} wait for nothing")

    def _unended(self) -> str:
        """Return the first names of the peers that still run, and how many more."""
        names = [self._plan.names[rank] for rank, peer in sorted(self._world.peers.items()) if peer.down_since is None]
        return _listed(names)

    # --- results ------------------------------------------------------------------------------------

    def _sum_up(self) -> Summary:
        results: dict[int, dict[str, Any]] = {}
        stopped: dict[int, dict[str, Any]] = {}
        for rank, peer in sorted(self._world.peers.items()):
            if peer.down_since is None and peer.trained[0] is not None:
                peer.sum_up(finished=False)
                stopped[rank] = peer.report
            elif peer.report and peer.has_left:
                stopped[rank] = peer.report
            elif peer.report:
                results[rank] = {"report": peer.report, "reports": {}, "doubted": ()}
        trained = [peer for rank, peer in self._world.peers.items() if rank in results and isinstance(peer, SimPeer)]
        averaged = consensus(trained)
        for result in results.values():
            result |= {f"consensus_{name}": averaged.get(name) for name in ("accuracy", "loss")}
        for recorder in self._recorders:
            recorder.close()
        peers = self._world.peers.values()
        began = min(self._began, *(peer.trained[0] for peer in peers if peer.trained[0] is not None))
        ended = max(self._world.now if peer.down_since is None else peer.down_since for peer in peers)
        traffic = self._plan.scenario.simulation.work == "traffic"
        summary = sum_up(self._plan.config, self._plan.names, not traffic, ended - began, results, stopped, results)
        ranks = range(self._plan.size)
        counted = {"crashes": self._crashes, "restarts": self._restarts, "lost_iterations": self._lost_iterations}
        summary = summary.with_figures({name: [count[rank] for rank in ranks] for name, count in counted.items()})
        if not results:
            summary = dataclasses.replace(summary, iterations=max(peer.step for peer in peers))
        if self._plan.scenario.simulation.retrievals is not None:
            summary = dataclasses.replace(summary, policy="given retrievals")
        if traffic:  # whose final models are not known
            summary = dataclasses.replace(summary, model=self._plan.scenario.simulation.model, agreed=None)
        return summary

    def _tell(self, summary: Summary, interrupted: bool) -> int:
        """Print the outcome; return the exit code."""
        print(f"{summary.name}: {summary.wall_seconds:.1f} s of virtual time; gossipx compare {self._directory.path}")
        for warned in list(self._world.warnings.values())[:SHOWN]:
            first, more = warned.first, f" (and {warned.count - 1} more of this kind)" if warned.count > 1 else ""
            print(f"{self._plan.names[first.rank]} at {first.time:.1f} s: {first.what}{more}", file=sys.stderr)
        if (hidden := len(self._world.warnings) - SHOWN) > 0:
            print(f"and {hidden} other kinds of warnings", file=sys.stderr)
        for (kind, at), ranks in self._without_effect.items():
            if ranks and (at <= self._world.now or self._world.over):
                told = _listed([self._plan.names[rank] for rank in ranks])
                print(f"the {kind} at {at:g} s had no effect on {told}: not running then", file=sys.stderr)
        churn = self._plan.scenario.churn
        if churn.rate and not self._churned:
            expected = churn.rate / 60 * self._plan.size * self._world.now
            told = f"{expected:.1f} crashes of {self._plan.size} peers in {self._world.now:.1f} s"
            print(f"no peer crashed: a rate of {churn.rate:g} is {told}; raise rate in [churn]", file=sys.stderr)
        stopped: dict[str, list[str]] = {}
        for rank, peer in sorted(self._world.peers.items()):
            begins_late = rank in self._plan.late or rank in self._restarts
            if begins_late and peer.trained[0] is None and self._is_over_without(rank):
                print(f"{self._plan.names[rank]} was started too late: the others had ended", file=sys.stderr)
            elif peer.reason is not None:
                stopped.setdefault(peer.reason, []).append(self._plan.names[rank])
        for reason, names in stopped.items():
            told = f"{names[0]} has" if len(names) == 1 else f"{_listed(names)} have"
            print(f"{told} stopped: {reason}", file=sys.stderr)
        if interrupted:
            print("interrupted: the figures are those until then", file=sys.stderr)
            return 130
        if stopped:
            return NotEnoughPeersError.exit_code
        if not any(peer.report for peer in self._world.peers.values()):
            print("no peer has trained to its end, or left", file=sys.stderr)
            return 1
        return DIFFERENT_MODELS if summary.agreed is False else 0
