"""The common base of the callbacks for Lightning and the Hugging Face Trainer.

Both frameworks call methods of a callback during training; only the names and arguments of the methods differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from gossipx.integrations.ddp import GroupPeer, PendingJoin, PolicyLike
from gossipx.runtime.figures.scores import Evaluate


class PeerCallback:
    """A base class for callbacks that make each training a peer; combine it with the framework's callback class.

    Args:
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: as for :func:`gossipx.join`.
        accuracy: name of a metric of the framework that is recorded as ``test/accuracy``.

    Attributes:
        peer: the peer; None before the first batch.
    """

    _framework = ""  # its name in messages

    def __init__(
        self,
        *,
        peers: str | Path | None = None,
        policy: PolicyLike = None,
        rank: int | None = None,
        evaluate: Evaluate | None = None,
        config_file: str | Path | None = None,
        accuracy: str | None = None,
        **settings: Any,
    ):
        self.peer: GroupPeer | None = None
        self._joining = PendingJoin(peers, policy, rank, evaluate, config_file, settings, self._framework, defers=True)
        self._accuracy = accuracy

    @property
    def directory(self) -> Path:
        """As :attr:`gossipx.Peer.directory`, available before training begins; it exists."""
        directory = self._joining.directory
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def shard(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """Return this peer's part of a data set by the run's ``partition``. Call it before training begins."""
        return self._joining.shard(dataset)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Run the finish, while the module is still on its training device."""
        if self.peer is not None:
            self.peer.finish()

    def _record_accuracy(self, metrics: Any) -> None:
        if self.peer is not None and self._accuracy in (metrics or {}):
            self.peer.log("test/accuracy", metrics[self._accuracy])
