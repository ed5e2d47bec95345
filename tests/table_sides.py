"""One peer's tables on both sides of the wire, without roles and a network, for tests of gossipx.tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from gossipx.protocol.effects import RequestedBucket
from gossipx.protocol.server_messages import GradientRequest, TablesReply
from gossipx.server.placement import Bucket, Layouts, Partition, Placement, Table, placement_from
from gossipx.tables.client import TableClient
from gossipx.tables.coding import Coding, TableSource
from gossipx.tables.parts import ApplyBuffer, ServerStorage, Storages, TransmitBuffer, raw
from gossipx.tables.shard import ShardStore
from gossipx.tables.store import TableStore

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 4), (5,), (0,), (), (2, 2, 2)]
OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


@dataclass
class Side:
    """One peer that is worker and all shards."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    placed: list[list[Partition]]
    cut: list[list[Bucket]]
    table_store: TableStore
    stores: dict[int, ShardStore]
    progress: int = 0
    whole: list[tuple[int, int]] = field(default_factory=list)

    @property
    def client(self) -> TableClient:
        return self.table_store.client

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute one iteration's gradients, and record the buckets that they complete, in order."""
        self.whole = []
        for table, gradient in reversed(list(enumerate(gradients))):
            if gradient is not None:
                self.whole += self.client.update(table, gradient)
        self.whole += self.client.flush()

    def request(self, place: tuple[int, int], **changed: Any) -> tuple[GradientRequest, bytearray]:
        """Return a push as it is sent."""
        parts, source = self.client.encode(place)
        made = GradientRequest(*place, 1, self.progress, parts, self.client.settings(place), 5.0)
        return msgspec.structs.replace(made, **changed), bytearray(source.view)

    def push(self, buffered: bool = False) -> None:
        """Push all complete buckets to the shards."""
        for place in self.whole:
            request, content = self.request(place)
            gradient = self.table_store.sink_for(request)
            assert gradient is not None
            gradient.take(0, memoryview(content))
            if buffered:
                self.table_store.buffer(gradient)
            else:
                self.table_store.apply(gradient, 1.0)
        self.progress += 1

    def train(self, gradients: Sequence[Tensor | None]) -> None:
        """Compute one iteration's gradients, and push them."""
        self.update(gradients)
        self.push()

    def saved(self) -> dict[str, Any]:
        """Return the worker's state of a checkpoint."""
        state = self.client.state_dict()
        assert state is not None
        return state

    def pull(self) -> None:
        """Pull all buckets into the model."""
        places = [(shard, number) for shard, cut in enumerate(self.cut) for number in range(len(cut))]
        self.client.expect(places)
        for place in places:
            given = self.table_store.encode(RequestedBucket(*place, base=self.client.base(place)))
            sink = self.client.sink(place)
            sink.fit(TablesReply(0, given.parts, base=given.base)).take(0, memoryview(bytearray(given.source.view)))
            given.release()
            self.client.fetched(place, sink)
        assert self.client.ready()
        self.client.apply()


def side(
    parameters: Sequence[Tensor],
    place: str | Placement = "uniform",
    servers: int = 2,
    optimizer: OptimizerOf = sgd,
    storages: Storages | None = None,
    least: int = 40,
    coding: Coding | None = None,
) -> Side:
    made = [one if isinstance(one, nn.Parameter) else nn.Parameter(one) for one in parameters]
    tables = [Table(str(number), one.numel()) for number, one in enumerate(made)]
    kinds = [(one.dtype, one.element_size()) for one in made]
    layouts = Layouts(tables, placement_from(place), kinds.__getitem__, least)
    layout = layouts.make(range(servers))
    step = optimizer(made)
    groups = {id(one): number for number, group in enumerate(step.param_groups) for one in group["params"]}
    coding = dataclasses.replace(coding or Coding(), groups=[groups.get(id(one), -1) for one in made])
    source = TableSource(made, step, storages or Storages(), coding)
    store = TableStore(source, 0, layouts, layout, range(servers))
    stores = {shard: hosted.store for shard, hosted in store._hosted.items()}
    return Side(made, step, layout.placed, layout.cut, store, stores)


def values(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


class Backwards(TransmitBuffer):
    """Sends the values in reverse order."""

    def encode(self) -> bytes:
        return bytes(raw(self.data.flip(0)))


class FromBehind(ServerStorage):
    def decode(self, encoded: memoryview) -> Tensor:
        return super().decode(encoded).flip(0)

    def encode(self) -> bytes:
        return bytes(raw(self.data.flip(0)))


class TakenFromBehind(ApplyBuffer):
    def decode(self, encoded: memoryview) -> None:
        super().decode(encoded)
        self.data.copy_(self.data.flip(0))


CODED = Storages(transmit=Backwards, server=FromBehind, apply=TakenFromBehind)


class LaterPieceFirst(Placement):
    """Halves each table and places the second half on the first server."""

    def decide(self, tables: Sequence[Table], servers: int) -> list[list[Partition]]:
        halves = [(number, table.size // 2, table.size) for number, table in enumerate(tables)]
        return [
            [Partition(number, half, size) for number, half, size in halves],
            [Partition(number, 0, half) for number, half, _ in halves],
        ]
