"""All of one peer's tables: those that it computes with, and the shards that it holds for others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossipx.errors import ProtocolError
from gossipx.memory import Memory
from gossipx.messages import GradientRequest
from gossipx.storage.client import Client, Settings
from gossipx.storage.shard import Given, ShardStore


class Gradient:
    """A bucket's gradient as it came; a :class:`gossipx.wire.Room` while it comes.

    Attributes:
        request: that brought it.
        view: its bytes.
    """

    def __init__(self, request: GradientRequest, memory: Memory, leave: Callable[[], None]):
        self.request = request
        self.view = memory.view
        self.nbytes = memory.view.nbytes
        self._leave: Callable[[], None] | None = leave

    def room(self, start: int) -> memoryview:
        """All that is left."""
        return self.view[start:]

    def filled(self, start: int) -> None:
        """Nothing is to be done with it yet."""

    def take(self, start: int, view: memoryview) -> None:
        """Copy them."""
        self.view[start : start + len(view)] = view

    def release(self) -> None:
        """Its memory may be used again."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    close = release


@dataclass
class _Hosted:
    """A shard that lies here."""

    store: ShardStore
    settings: Settings = ()  # of the optimizer, as the worker has them that is ahead
    progress: int = -1  # ... of that worker


class Desk:
    """One peer's tables, and what is done with them.

    Args:
        client: its own side.
        stores: by shard, those that lie here.
        parameters: the model's, by table.
        optimizer: the worker's, whose settings go with each push.
        asks_significance: whether pulls tell how large the last gradient was.
        places: gradients of others that come in at a time; who brings more waits.
    """

    def __init__(
        self,
        client: Client,
        stores: Mapping[int, ShardStore],
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        asks_significance: bool = False,
        places: int = 8,
    ):
        self.client = client
        self.asks_significance = asks_significance
        self._hosted = {index: _Hosted(store) for index, store in stores.items()}
        self._parameters = parameters
        self._optimizer = optimizer
        client.settings_now = self.settings
        self._places = threading.BoundedSemaphore(places)
        self._lock = threading.Lock()
        self._free: dict[int, list[Memory]] = {}

    # --- of the worker ----------------------------------------------------------------------------

    def settings(self) -> Settings:
        """The numbers in the optimizer's parameter groups, as they are now (a schedule's learning rate)."""
        return tuple(
            {
                name: float(value)
                for name, value in group.items()
                if (isinstance(value, int | float) and not isinstance(value, bool))
                or (isinstance(value, Tensor) and value.numel() == 1)
            }
            for group in self._optimizer.param_groups
        )

    # --- of the shards ----------------------------------------------------------------------------

    def room_for(self, request: GradientRequest) -> Gradient | None:
        """Where a push is taken in, once there is a place; None: there was none for as long as its sender waits.

        Raises:
            ProtocolError: it is of no shard that lies here, or does not fit it.
        """
        hosted = self._hosted.get(request.shard)
        if hosted is None:
            raise ProtocolError(f"a push for shard {request.shard}, which is not here")
        size = hosted.store.size(request)
        if not self._places.acquire(timeout=request.patience):
            return None
        with self._lock:
            free = self._free.setdefault(size, [])
            memory = free.pop() if free else Memory(size)

        def leave() -> None:
            with self._lock:
                self._free[size].append(memory)
            self._places.release()

        return Gradient(request, memory, leave)

    def fill(self, shard: int) -> None:
        """A shard begins with the values of our own model."""
        self._hosted[shard].store.fill(self._parameters)

    def apply(self, gradient: Gradient, scale: float) -> None:
        """One optimizer step with it; errors as those of :meth:`ShardStore.decode`."""
        with contextlib.closing(gradient):
            hosted, request = self._told(gradient)
            decoded = hosted.store.decode(request, gradient.view)
            hosted.store.apply(request.bucket, decoded, scale, hosted.settings)

    def buffer(self, gradient: Gradient) -> None:
        """Add it to the gradient buffer; errors as those of :meth:`ShardStore.decode`."""
        with contextlib.closing(gradient):
            hosted, request = self._told(gradient)
            hosted.store.add(request.bucket, hosted.store.decode(request, gradient.view))

    def apply_buffer(self, shard: int) -> None:
        """One optimizer step with the mean of the gradient buffer."""
        hosted = self._hosted[shard]
        hosted.store.apply_buffer(hosted.settings)

    def encode(self, shard: int, bucket: int) -> Given:
        """A bucket as workers are given it; to be given back by :meth:`release`."""
        return self._hosted[shard].store.encode(bucket)

    def release(self, shard: int, given: Given) -> None:
        """It is sent, or of no interest any more; from any thread."""
        self._hosted[shard].store.release(given)

    def state_dict(self, shard: int) -> dict[str, Any]:
        """All of a shard's tables; tensors are not copies."""
        hosted = self._hosted[shard]
        return {"store": hosted.store.state_dict(), "settings": list(hosted.settings), "progress": hosted.progress}

    def load_state_dict(self, shard: int, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; UsageError if it is of other tables."""
        hosted = self._hosted[shard]
        hosted.store.load_state_dict(state["store"])
        hosted.settings, hosted.progress = tuple(state["settings"]), state["progress"]

    def _told(self, gradient: Gradient) -> tuple[_Hosted, GradientRequest]:
        request = gradient.request
        hosted = self._hosted[request.shard]
        if request.progress >= hosted.progress:
            hosted.progress, hosted.settings = request.progress, request.settings
        return hosted, request
