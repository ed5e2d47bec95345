"""The systems of bin/bench evidence, and the periods with which they run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _evidence_programs as programs
from _evidence_task import WORKLOADS

from gossipx.tasks.presets import PRESETS

PERIODS = (10, 20, 50, 100, 200)
"""Steps between two exchanges, of which each system gets its best."""
SHORT_PERIOD = 50
"""The period of the short form, the middle one. ``bin/bench evidence --full --rate 1000mbit --seeds 1`` finds the best
of each system and shows it in its table."""


@dataclass(frozen=True)
class System:
    """A system, whose program runs one peer; of gossipx in the script that ``gossipx run`` starts.

    Options of gossipx are those of ``gossipx run``, with ``{period}``; ``{adaptive}``, the paper's rule with the
    threshold of the model's preset; and ``{everyone}``, all ranks. Those of others are for the program. If it is
    synchronous, all peers wait for each other in each step, so that its losses are those of any link.
    """

    program: Callable[..., None]
    options: tuple[str, ...] | dict[str, Any]
    periodic: bool = False
    package: str | None = None
    is_synchronous: bool = False

    @property
    def is_gossipx(self) -> bool:
        """Whether it is gossipx itself."""
        return self.program is programs.gossipx

    def arguments(self, workload: str, period: int | None, peers: int) -> list[str]:
        """Return the options of ``gossipx run``."""
        adaptive = f"adaptive:threshold={PRESETS[WORKLOADS[workload].model].threshold:g}"
        everyone = ",".join(map(str, range(peers)))
        return [option.format(period=period, adaptive=adaptive, everyone=everyone) for option in self.options]


def _run(*options: str, periodic: bool = False, is_synchronous: bool = False) -> System:
    return System(programs.gossipx, options, periodic, is_synchronous=is_synchronous)


def _ddp(**options: Any) -> System:
    return System(programs.ddp, options, is_synchronous=True)


WAVES = ("--exchange", "waves", "--policy", "tau:{period}")
RARE = ("--policy", "tau:50")
MOMENTUM = ("--outer", "momentum:0.6")
LOW_BITS = ("--codec", "3lc:sparsity=1,residual=0.3")
CHOCO = ("--mixing", "choco:gamma=0.5")
ONE_BIT = ("--mode", "pushpull", "--codec", "efsignsgd", *CHOCO)
BSP = ("--servers", "{everyone}", "--sync", "bsp")
SSP = ("--servers", "{everyone}", "--sync", "ssp:3", "--apply", "tick")
"""One step of the optimizer per clock: with one per gradient, which is the default, Adam makes N steps per clock."""
SERVER_CODEC = ("--push-codec", "3lc:1.75", "--pull-codec", "3lc:1.75")
DDP = "ddp"
SYSTEMS = {
    DDP: _ddp(kind="plain"),
    "ddp-fp16": _ddp(kind="fp16"),
    "ddp-powersgd": _ddp(kind="powersgd", rank=1),
    "ddp-powersgd-4": _ddp(kind="powersgd", rank=4),
    "local-sgd": System(programs.ddp, {"kind": "local", "averaged": 0.0}, periodic=True),
    "post-local-sgd": System(programs.ddp, {"kind": "local", "averaged": 0.05}, periodic=True),
    "diloco": System(programs.torchft, {}, periodic=True, package="torchft"),
    "hivemind": System(programs.hivemind, {}, periodic=True, package="hivemind"),
    "never": _run("--policy", "never"),
    "tau:10": _run("--policy", "tau:10"),
    "paper": _run("--policy", "{adaptive}", "--outer", "none", "--finish", "none", "--blocking"),
    "tau:50": _run(*RARE),
    "tau:10-3lc": _run("--policy", "tau:10", *LOW_BITS),
    "momentum": _run(*RARE, *MOMENTUM),
    "momentum-3lc": _run(*RARE, *MOMENTUM, *LOW_BITS),
    "pairs": _run("--mode", "pushpull", "--policy", "tau:{period}", *MOMENTUM, periodic=True),
    "pairs-3lc": _run("--mode", "pushpull", *RARE, *MOMENTUM, *LOW_BITS, *CHOCO),
    "pairs-sign": _run("--policy", "tau:{period}", *ONE_BIT, periodic=True),
    "pairs-sign:5": _run("--policy", "tau:5", *ONE_BIT),
    "pairs-sign:2": _run("--policy", "tau:2", *ONE_BIT),
    "pairs-sign:1": _run("--policy", "tau:1", "--blocking", *ONE_BIT),
    "waves": _run(*WAVES, "--outer", "nesterov:lr=0.7,momentum=0.9", periodic=True),
    "waves-topk2": _run(*WAVES, "--codec", "topk2", periodic=True),
    "hub": _run("--hub", "0", "--policy", "tau:{period}", periodic=True),
    "bsp": _run(*BSP, is_synchronous=True),
    "bsp-int8": _run(*BSP, "--push-codec", "int8", "--pull-codec", "int8", is_synchronous=True),
    "bsp-3lc": _run(*BSP, *SERVER_CODEC, is_synchronous=True),
    "ssp": _run(*SSP),
    "ssp-3lc": _run(*SSP, *SERVER_CODEC),
}
"""By name. The hub and the servers train too, so that every system has the same machines."""
SHORT = (DDP, "ddp-powersgd", "diloco", "tau:10", "tau:10-3lc", "pairs-sign:5", "waves-topk2")
"""Systems without --full."""


def shown(name: str) -> str:
    """Return the name of a system in the table."""
    return f"gossipx {name}" if SYSTEMS[name].is_gossipx else name


def missing(names: list[str]) -> dict[str, str]:
    """Return the package that is missing, by the name of each system that cannot run without it."""
    needed = {name: SYSTEMS[name].package for name in names}
    return {name: one for name, one in needed.items() if one and importlib.util.find_spec(one) is None}
