"""The settings of a simulated run: a TOML file with those of ``gossipx run``, and with what it runs on.

The tables ``[run]``, ``[task]``, ``[sync]``, ``[hub]``, ``[server]`` and ``[exchange]`` are those of
:mod:`gossipx.settings.sections`. The others are declared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gossipx.errors import UsageError
from gossipx.settings import files
from gossipx.settings.keys import keys_of, setting
from gossipx.settings.sections import KEYS as OF_RUN
from gossipx.settings.sections import RunConfig, marked
from gossipx.specs import texts, toml

MOST_PEERS = 10_000
"""They take about 700 MB."""
MANY = 64
"""More peers than this begin without announcements, unless the scenario asks for them; see :class:`Simulation`."""
MOST_FAULTS = 1_000
"""Faults of a scenario, each with its place in messages."""
LONGEST = 1e9
"""Upper limit of settings in seconds: 30 years."""


@dataclass(frozen=True)
class Simulation:
    """The peers and their work; the TOML table ``[simulation]``."""

    peers: int = setting(4, 1, MOST_PEERS)
    """Number of peers."""
    work: Literal["real", "traffic"] = setting("real")
    """real: gradients are computed, and only time is modelled; traffic: only sizes and times are known."""
    model: str | None = setting(None)
    """With traffic: the model whose layer sizes and step time are used."""
    parameters: int | None = setting(None, 1, 10**12)
    """With traffic and without servers: the number of parameters, if it is not that of the model."""
    deltas: str | None = setting(None)
    """With traffic: the trace of deltas that the policy decides on, by name or as a CSV file."""
    retrievals: tuple[float, ...] | None = setting(None, 0, 1e9)
    """With traffic: the retrievals of each peer, evenly spaced, instead of a policy; one number for all peers or one
    per peer."""
    encoded: float | None = setting(None, 1e-6, 2)
    """With traffic and a codec: size of what is sent as a share of raw values."""
    announcements: bool | None = setting(None)
    """Whether peers announce themselves to all others at the start, as in a real run: N² messages. Default: with up to
    64 peers."""
    recorded: int = setting(8, 0, MOST_PEERS)
    """Number of peers whose curves are recorded, besides the mean of all. Without announcements, only these evaluate
    their final models."""


@dataclass(frozen=True)
class Compute:
    """The time of an iteration; the TOML table ``[compute]``."""

    seconds: float | None = setting(None, 1e-6, LONGEST)
    """Mean seconds of an iteration. Default with traffic: those of the model."""
    spread: str = setting("constant")
    """How the seconds of an iteration vary: constant or log-normal:sigma=0.3."""
    forward: float | None = setting(None, 0, 1)
    """With traffic and servers: share of the forward pass, which begins with the first values; 0: training waits for
    all values. Default: a third."""
    straggler_share: float = setting(0.0, 0, 1)
    """Share of the peers that are slower, drawn by the seed."""
    straggler_factor: float = setting(3.0, 1, 1e6)
    """How much longer their iterations take."""
    delay_share: float = setting(0.0, 0, 1)
    """Share of the peers whose iterations are delayed by |N(0, delay_deviation)| seconds."""
    evaluation: float = setting(0.0, 0, LONGEST)
    """Seconds of the evaluation at the end of training, in which exchanges under way may end."""
    delay_deviation: float = setting(0.25, 0, LONGEST)
    """Standard deviation of these delays, in seconds."""


@dataclass(frozen=True)
class NetworkSettings:
    """The network; the TOML table ``[network]``. Values that are given replace those of the preset."""

    preset: Literal["10mbit", "100mbit", "1gbit", "10gbit", "wan"] = setting("1gbit")
    """The other values of this table."""
    up: str | None = setting(None, check="transports.pace:parse_bandwidth")
    """Bandwidth at which a peer sends."""
    down: str | None = setting(None, check="transports.pace:parse_bandwidth")
    """Bandwidth at which a peer receives."""
    slow_share: float = setting(0.0, 0, 1)
    """Share of the peers whose links are slower, drawn by the seed."""
    slow_factor: float = setting(10.0, 1, 1e6)
    """How much less bandwidth their links have, in each direction."""
    latency: float | None = setting(None, 0, 60)
    """Seconds that a message takes in one direction."""
    jitter: float | None = setting(None, 0, 60)
    """Maximum additional latency in seconds, drawn per message."""
    loss: float | None = setting(None, 0, 0.5)
    """Share of packets that are lost, which limits each TCP connection."""
    uneven: float = setting(1.0, 0, 3)
    """How unevenly transfers share a link: standard deviation of the logarithm of their weights; 0: equally."""
    per_message: float = setting(0.0, 0, 60)
    """Seconds for which a message with tensors occupies its links besides its bytes, such as 1e-4."""
    sites: int = setting(1, 1, MOST_PEERS)
    """Number of sites; ranks are divided among them evenly, in order."""
    uplink: str | None = setting(None, check="transports.pace:parse_bandwidth")
    """Bandwidth of each site's connection to the others, shared by its peers."""
    site_latency: float = setting(0.0, 0, 60)
    """Additional latency between sites in seconds."""


@dataclass(frozen=True)
class Churn:
    """Peers that crash at random and return; the TOML table ``[churn]``."""

    rate: float = setting(0.0, 0, 60)
    """Share of the peers that crash per minute."""
    downtime: float = setting(30.0, 0, LONGEST)
    """Mean seconds until a crashed peer is started again; 0: it never is."""
    state: Literal["kept", "lost"] = setting("lost")
    """Whether it returns with its last checkpoint, or takes the model of another peer."""


@dataclass(frozen=True)
class PlannedFault:
    """One fault; an entry of the TOML list ``[[faults]]``."""

    kind: Literal["crash", "pause", "leave", "partition", "late"] = setting("crash")
    """crash: the process is killed; pause: it is suspended; leave: it is asked to stop; partition: peers and all others
    do not reach each other; late: it starts only then."""
    peers: tuple[float, ...] | None = setting(None, 0, MOST_PEERS - 1)
    """Ranks of the peers."""
    at: float = setting(0.0, 0, LONGEST)
    """When it begins, in seconds."""
    until: float | None = setting(None, 0, LONGEST)
    """When a pause or a partition ends, or a crashed peer is started again."""
    state: Literal["kept", "lost"] = setting("lost")
    """Whether a peer that is started again has its last checkpoint, or takes the model of another peer."""
    one_way: bool = setting(False)
    """Whether the peers of a partition are still reached by the others."""

    @property
    def ranks(self) -> list[int]:
        """The ranks of the peers."""
        return [int(rank) for rank in self.peers or ()]


OWN = keys_of({"simulation": [Simulation], "compute": [Compute], "network": [NetworkSettings], "churn": [Churn]})
"""The settings of the tables that are declared here, by name."""
FAULTS = "faults"
OF_FAULT = keys_of({FAULTS: [PlannedFault]})
UNTIL = ("crash", "pause", "partition")
"""Kinds of faults that may end."""
NEEDS = {
    "straggler_factor": "straggler_share",
    "delay_deviation": "delay_share",
    "slow_factor": "slow_share",
    "downtime": "rate",
    "state": "rate",
}
"""Settings that have an effect only with another one."""
IN_TRAFFIC = marked("training") | {key.name for key in OF_RUN.values() if key.table == "task"}
"""Settings of training, which work ``traffic`` does not have."""
WITH_MODELS = frozenset(["wait_free"])
"""Settings without an effect on work ``real``: all gradients of an iteration are computed at one moment, its end."""


@dataclass(frozen=True)
class Scenario:
    """A simulated run.

    Attributes:
        config: the settings that ``gossipx run`` has, too.
        path, text: the file.
    """

    simulation: Simulation
    compute: Compute
    network: NetworkSettings
    churn: Churn
    faults: tuple[PlannedFault, ...]
    config: RunConfig
    path: Path
    text: str


def load(path: Path, given: Mapping[str, Any]) -> Scenario:
    """Read a scenario.

    Args:
        given: settings of ``gossipx run`` that replace those of the file; None: not given.

    Raises:
        UsageError: names the file, the line, the error and the likely intention.
    """
    text = texts.read(path, "scenario")
    tables = toml.loads(text, path)
    faults = tables.pop(FAULTS, [])
    own = {name: tables.pop(name) for name in list(tables) if name in {key.table for key in OWN.values()}}
    unknown = next((name for name in tables if name not in {key.table for key in OF_RUN.values()}), None)
    if unknown is not None:  # told with all that a scenario may have
        files.values_in({unknown: tables[unknown]}, {**OF_FAULT, **OF_RUN, **OWN}, text, path)
    values = files.values_in(own, OWN, text, path)

    def table(kind: Any, name: str) -> Any:
        return kind(**{key.name: values[key.name] for key in OWN.values() if key.table == name and key.name in values})

    scenario = Scenario(
        table(Simulation, "simulation"),
        table(Compute, "compute"),
        table(NetworkSettings, "network"),
        table(Churn, "churn"),
        tuple(_fault(fault, text, path) for fault in _listed(faults, text, path)),
        files.resolve(files.values_in(tables, OF_RUN, text, path), given),
        path,
        text,
    )
    try:
        for name, share in NEEDS.items():
            if name in values and share not in values:
                raise UsageError(f"{name} has no effect without {share}: give it, or leave this out")
        _check(scenario)
    except UsageError as error:
        raise UsageError(str(error), path) from None
    return scenario


def _listed(faults: Any, text: str, path: Path) -> list[Any]:
    if isinstance(faults, list) and len(faults) > MOST_FAULTS:
        raise UsageError(f"{len(faults)} faults, and at most {MOST_FAULTS} can be named: use [churn] for more", path)
    if not isinstance(faults, list) or not all(isinstance(fault, dict) for fault in faults):
        line = files.line_of(text, None, FAULTS)
        raise UsageError(f"'{FAULTS}' is not a list of tables: write [[{FAULTS}]] above each fault", path, line)
    return faults


def _fault(fault: Mapping[str, Any], text: str, path: Path) -> PlannedFault:
    made = PlannedFault(**files.values_in({FAULTS: fault}, OF_FAULT, text, path))
    problem = ""
    if "kind" not in fault or not made.peers or any(rank % 1 for rank in made.peers):
        problem = "a fault needs a kind and the ranks of its peers, such as peers = [3]"
    elif made.until is not None and made.kind not in UNTIL:
        problem = f"until is for {', '.join(UNTIL)}, and a fault of kind {made.kind} has no end: leave it out"
    elif made.until is not None and made.until <= made.at:
        problem = f"it ends at {made.until:g} s, before it begins at {made.at:g} s"
    elif made.until is None and made.kind == "pause":
        problem = "a pause needs its end: give until"
    elif "one_way" in fault and made.kind != "partition":
        problem = f"one_way is for a partition, not for {made.kind}: leave it out"
    elif "state" in fault and made.kind != "crash":
        problem = f"state is for a crash, not for {made.kind}: leave it out"
    if problem:
        raise UsageError(f"[[{FAULTS}]]: {problem}", path, files.line_of(text, None, FAULTS))
    return made


def _check(scenario: Scenario) -> None:
    """Refuse settings that exclude or need each other."""
    of = scenario.simulation
    for name in sorted(marked("real") & scenario.config.given):
        raise UsageError(f"{name} has no effect on a simulated run: leave it out")
    refused, other = (IN_TRAFFIC, "real") if of.work == "traffic" else (WITH_MODELS, "traffic")
    for name in sorted(refused & scenario.config.given):
        raise UsageError(f'{name} in [{OF_RUN[name].table}] is for work = "{other}": leave it out, or give that')
    outside = [rank for fault in scenario.faults for rank in fault.ranks if rank >= of.peers]
    if outside:
        raise UsageError(f"[[{FAULTS}]] names peer {outside[0]}, and the last of {of.peers} peers is {of.peers - 1}")
    _check_faults(scenario)
    kept = scenario.churn.state == "kept" or any(fault.state == "kept" for fault in scenario.faults)
    if kept and of.work == "real" and str(scenario.config.run.checkpoint_every) == "0":
        raise UsageError('state = "kept" has no effect without checkpoints: give checkpoint_every in [run]')
    if of.work == "real":
        for name in ("model", "parameters", "deltas", "retrievals", "encoded"):
            if getattr(of, name) is not None:
                raise UsageError(f'{name} is for work = "traffic": leave it out, or give that')
        if scenario.compute.seconds is None:
            raise UsageError("[compute] needs the seconds of an iteration: give seconds")
    elif of.model is None:
        raise UsageError('work = "traffic" needs the model whose sizes are used: give model in [simulation]')
    elif of.retrievals is not None and len(of.retrievals) not in (1, of.peers):
        raise UsageError(f"retrievals has {len(of.retrievals)} numbers for {of.peers} peers: give one, or one per peer")
    given = {**vars(scenario.compute), **vars(scenario.network)}
    for name in ("straggler_share", "delay_share", "slow_share"):
        if given[name] and not round(of.peers * given[name]):
            raise UsageError(f"{name} is {given[name]:g}, and that share of {of.peers} peers is none: give more")
    if scenario.network.loss and scenario.network.latency == 0:
        raise UsageError("loss limits a connection by its latency: give a latency above 0, or leave loss out")
    if scenario.network.sites > of.peers:
        raise UsageError(f"sites is {scenario.network.sites}, and there are {of.peers} peers")
    if scenario.network.sites == 1 and (scenario.network.uplink or scenario.network.site_latency):
        raise UsageError("uplink and site_latency are for several sites: give sites, or leave them out")


def _check_faults(scenario: Scenario) -> None:
    """Refuse faults that cannot have an effect."""
    peers = scenario.simulation.peers
    late: dict[int, float] = {}
    for fault in scenario.faults:
        for rank in fault.ranks if fault.kind == "late" else ():
            if late.setdefault(rank, fault.at) != fault.at:
                raise UsageError(f"[[{FAULTS}]] starts peer {rank} late twice: give one time")
    for fault in scenario.faults:
        early = [rank for rank in fault.ranks if fault.kind != "late" and fault.at < late.get(rank, 0.0)]
        if early and fault.kind != "partition":
            raise UsageError(f"[[{FAULTS}]] has a {fault.kind} of peer {early[0]} before it starts: give a later time")
        if fault.kind == "partition" and len(set(fault.ranks)) == peers:
            raise UsageError(f"[[{FAULTS}]] has a partition of all peers, from no other: name some of them")
