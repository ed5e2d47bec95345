"""A callback that makes each Lightning training a peer."""

from __future__ import annotations

from typing import Any

from gossipx.errors import UsageError
from gossipx.integrations.callback import PeerCallback

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback
    except ImportError as error:
        raise UsageError(f"Lightning cannot be imported ({error}): pip install 'gossipx[lightning]'") from error

KNOWN = {"SingleDeviceStrategy", "DDPStrategy"}
"""Strategies under which each process holds the whole model."""


class GossipCallback(PeerCallback, Callback):
    """Make a Lightning training a peer; nothing else changes.

    ``fit`` joins before its first batch and ends with the finish. Under DDP the processes of a fit are one peer. With
    several optimizers a step of the last one is an iteration. Lightning's checkpoints hold gossipx's state, too, so
    that ``fit(ckpt_path=...)`` goes on from there.

    Under ``gossipx run`` nothing has to be given.

    Args:
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: gives the LightningModule's accuracy from 0 to 1, for the figures before and after the finish.
        accuracy: name of a metric that the module logs in validation, to be recorded as ``test/accuracy``.

    Attributes:
        peer: the peer, from the first batch on.
    """

    _loaded: dict[str, Any] | None = None
    _every = 1

    # --- what Lightning calls -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """All is in its place: the module on its device and in DDP, checkpoints loaded."""
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        if not KNOWN & set(kinds) or "DeepSpeedStrategy" in kinds:
            raise UsageError(
                f"{kinds[0]} splits the model among processes: gossipx takes one device or strategy='ddp', where each "
                "process holds all of it"
            )
        if not trainer.optimizers:
            raise UsageError("configure_optimizers gives no optimizer, whose steps gossipx counts")
        self._every = self._joining.run.run.log_interval
        state, self._loaded = self._loaded, None
        self.peer = self._joining.join(pl_module, trainer.optimizers[-1], state)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if self.peer is not None and loss is not None and self.peer.iteration % self._every == 0:
            self.peer.log("train/loss", float(loss) * trainer.accumulate_grad_batches)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the accuracy."""
        self._record_accuracy(trainer.callback_metrics)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training failed: the other peers go on without this one."""
        if self.peer is not None:
            self.peer.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return {} if self.peer is None else self.peer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From one of Lightning's checkpoints, before the training begins."""
        self._loaded = state_dict or None
