"""The training of one peer without a network, for tests of its checkpoints."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossipx import outer, policies, topology
from gossipx.checkpoint import Store
from gossipx.hub import ElasticExchange
from gossipx.model.arena import ParameterArena
from gossipx.peer import PeerRole
from gossipx.runtime.checkpoints import Checkpoints, TrainingState
from gossipx.runtime.driver import Driver
from gossipx.runtime.optimizers import Optimizers
from gossipx.settings import files
from gossipx.settings.interval import CheckpointInterval
from gossipx.settings.modes import Elastic
from gossipx.sync import SyncManager

ABOUT = {"--policy": "never", "peers": 2}


class Net(nn.Module):
    """A model with trained, frozen and tied parameters, and integer and floating-point buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.norm(self.two(self.one(x))).sum() * self.image.sum() * 1e-3


class Bench:
    """The training of one peer that has no connection to others."""

    def __init__(
        self,
        directory: Path | None,
        every: str = "10",
        resumes: bool = False,
        dtype: torch.dtype = torch.float32,
        policy: str = "never",
        about: Mapping[str, Any] = ABOUT,
        net: Callable[[torch.dtype], nn.Module] = Net,
        sampled: int | None = None,
        hub: Elastic | None = None,
        rule: str = "none",
        fragments: int = 1,
        several: bool = False,
    ):
        self.module = net(dtype)
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(trained[several:], lr=0.01)
        more = [torch.optim.SGD(trained[:1], lr=0.01, momentum=0.9)] if several else []
        self.optimizers = Optimizers(self.module, [self.optimizer, *more])
        self.arena = ParameterArena(self.module, sampled=sampled, fragments=fragments)
        if (parsed := outer.outer_from(rule)) is not None:
            self.arena.use_outer(parsed)
        graph = topology.topology_from("full", 2)
        exchange_of = None if hub is None else functools.partial(ElasticExchange, settings=hub, hub=0)
        sync = SyncManager(policies.parse(policy), seed=1)
        settings = files.resolve({"fragments": fragments})
        role = PeerRole(0, 2, sync, graph, random.Random(1), 1, settings=settings, exchange_of=exchange_of)
        self.driver = Driver(role, self.arena)
        self.store = None if directory is None else Store(directory)
        state = TrainingState(self.optimizers, self.driver, about)
        self.checkpoints = Checkpoints(self.store, CheckpointInterval.parse(every), state, resumes)

    def begin(self) -> dict[str, Any]:
        kept = self.checkpoints.restore()
        self.checkpoints.start()
        return kept

    def step(self, count: int = 1, flush: bool = True) -> None:
        for _ in range(count):
            self.module.zero_grad()
            self.module(torch.randn(8, 4, dtype=self.module.one.weight.dtype)).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            delta, role = self.arena.step_done(), self.driver.role
            drift = self.driver.captures.drift(role.pulling) if role.sync.policy.uses_drift else None
            role.sync.step(self.arena.step, delta, drift)
            self.checkpoints.step_done(lambda: {"steps": self.arena.step})
            self.arena.leave_boundary()
            if flush:
                assert self.checkpoints.flush() is None

    def all(self) -> list[torch.Tensor]:
        """Return all values that the next training step depends on."""
        masters = [section.values.clone() for section in self.arena.sections]
        return [*masters, *(t.detach().clone() for t in [*self.module.parameters(), *self.module.buffers()])]

    def centre(self) -> list[torch.Tensor]:
        """Return the hub's centre; start the hub if it has none yet."""
        exchange = self.driver.role.exchange
        assert isinstance(exchange, ElasticExchange) and exchange.centre is not None
        for effect in exchange.start_serving(0.0):
            self.driver._carry_out_locked(effect)
        held = self.driver.captures.hold(exchange.centre.ticket)
        assert held is not None
        values = [vector.clone() for vector in held.buffer.vectors]
        held.release()
        return values

    def close(self) -> None:
        self.checkpoints.close()
        self.driver.close()
