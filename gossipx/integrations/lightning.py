"""The integration with Lightning: a callback that makes each training a peer."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from torch import nn

from gossipx.errors import UsageError, how_to_install
from gossipx.integrations.callback import PeerCallback
from gossipx.integrations.ddp import GroupPeer
from gossipx.model.layout import can_be_mixed

try:
    from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelCheckpoint, OnExceptionCheckpoint
except ImportError:
    try:
        from pytorch_lightning.callbacks import BaseFinetuning, Callback, ModelCheckpoint, OnExceptionCheckpoint
    except ImportError as error:
        raise UsageError(f"Lightning cannot be imported ({error}): {how_to_install('lightning')}") from error

KNOWN = {"SingleDeviceStrategy", "DDPStrategy"}
"""Strategies under which each process holds the whole model."""
STOPPED = "stopped.ckpt"
"""File in the peer's directory into which Lightning saves its state when a signal has asked to stop."""


class LightningCallback(PeerCallback, Callback):
    """A Lightning callback that makes a training a peer; the rest of the script is unchanged.

    ``fit`` joins before its first batch and ends with the finish. Under DDP the processes of a fit are one peer. With
    several optimizers, an iteration ends when all of them have stepped. Lightning's checkpoints contain gossipx's
    state, so that ``fit(ckpt_path=...)`` resumes from them. Each peer's are in a directory of its own. With a callback
    that unfreezes parameters (``BaseFinetuning``), peers exchange frozen parameters too, from the start.

    Under ``gossipx run`` no argument is needed.

    Args:
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: as for :func:`gossipx.join`, of the LightningModule.
        accuracy: name of a metric that the module logs in validation; it is recorded as ``test/accuracy``.

    Attributes:
        peer: the peer; None before the first batch.
    """

    _framework = "Lightning"
    _loaded: dict[str, Any] | None = None
    _every = 1

    # --- called by Lightning ------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give this peer directories of its own for checkpoints, before Lightning uses them."""
        if stage != "fit":
            return
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that a shared directory is not empty
                    callback.setup(trainer, pl_module, stage)  # it chooses a directory; Lightning calls it again
            if isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)):
                callback.dirpath = self._joining.own(callback.dirpath)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join: by now the module is on its device and wrapped by DDP, and a checkpoint is loaded."""
        kinds = [kind.__name__ for kind in type(trainer.strategy).__mro__]
        if not KNOWN & set(kinds) or "DeepSpeedStrategy" in kinds:
            raise UsageError(
                f"{kinds[0]} splits the model among processes: gossipx needs the whole model in each process, "
                "so use one device or strategy='ddp'"
            )
        if not trainer.optimizers:
            raise UsageError("configure_optimizers returns no optimizer: gossipx needs one to count its steps")
        self._every = self._joining.run.run.log_interval
        state, self._loaded = self._loaded, None
        with contextlib.ExitStack() as undo:
            if any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks):
                _unfreeze(pl_module, undo)
            self.peer = self._joining.join(pl_module, trainer.optimizers, state)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record the loss; after a signal, save Lightning's state and leave."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if self.peer is not None and loss is not None and self.peer.iteration % self._every == 0:
            self.peer.log("train/loss", float(loss) * trainer.accumulate_grad_batches)
        if self.peer is not None and self.peer.asked:
            self._stop(self.peer, trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Record the accuracy."""
        self._record_accuracy(trainer.callback_metrics)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave after a failed training, so that the other peers continue without this one."""
        # After SIGTERM Lightning itself ends the batch with an exception. Saving needs all ranks of a group.
        if self.peer is not None and self.peer.asked and trainer.world_size == 1:
            self._stop(self.peer, trainer)
        if self.peer is not None:
            self.peer.__exit__(type(exception), exception, exception.__traceback__)

    def _stop(self, peer: GroupPeer, trainer: Any) -> None:
        kept = str(peer.directory / STOPPED)
        trainer.save_checkpoint(kept)
        peer.leave_saved(kept)

    def state_dict(self) -> dict[str, Any]:
        """Return gossipx's state for Lightning's checkpoints."""
        return {} if self.peer is None else self.peer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state from a Lightning checkpoint until the training begins."""
        self._loaded = state_dict or None


def _unfreeze(module: nn.Module, undo: contextlib.ExitStack) -> None:
    """Unfreeze all parameters that a finetuning callback may unfreeze later: a peer exchanges those trained at join."""
    for parameter in module.parameters():
        has_gradients = parameter.is_floating_point() or parameter.is_complex()
        if has_gradients and can_be_mixed(parameter) and not parameter.requires_grad:
            undo.callback(parameter.requires_grad_(True).requires_grad_, False)


GossipCallback = LightningCallback
"""The name by which scripts import it."""
