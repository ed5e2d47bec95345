"""The integration with the Hugging Face Trainer: a callback that makes each training a peer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from gossipx.errors import UsageError, how_to_install
from gossipx.integrations.accelerate import check_whole
from gossipx.integrations.callback import PeerCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise UsageError(f"transformers cannot be imported ({error}): {how_to_install('transformers')}") from error

STATE_KEY = "gossipx"
"""Key of gossipx's state within the Trainer's state."""


class PeerTrainerCallback(PeerCallback, TrainerCallback):
    """A Trainer callback that makes a training a peer; the rest of the script is unchanged.

    ``train`` joins before its first batch and ends with the finish. Under DDP the processes of a training are one peer.
    The Trainer's checkpoints contain gossipx's state in ``trainer_state.json``, so that
    ``train(resume_from_checkpoint=...)`` resumes from them. Each peer's are in a directory of its own within
    ``output_dir``.

    Under ``gossipx run`` no argument is needed.

    Args:
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: as for :func:`gossipx.join`.
        accuracy: name of a metric of the Trainer's evaluation, such as ``eval_accuracy``; recorded as
            ``test/accuracy``.

    Attributes:
        peer: the peer; None before the first batch.
    """

    _framework = "the Trainer"
    _stops = False  # a signal has asked for it
    _has_loss = False  # whether the model's output has the loss of its batch
    _is_share = False  # whether a micro-batch's loss is a share of the batch's

    # --- called by the Trainer ----------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give this peer an output directory of its own, in which ``resume_from_checkpoint=True`` looks, too."""
        args.output_dir = self._joining.own(args.output_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join: by now the model is on its device and wrapped by DDP, and a checkpoint is loaded."""
        self.on_init_end(args, state, control)  # the callback may have been added later
        check_whole(args.distributed_state.distributed_type)
        if self.peer is not None:
            self.peer.leave()  # its training failed
        saved = state.stateful_callbacks.get(STATE_KEY)
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # unwrap Accelerate's optimizer
        self.peer = self._joining.join(kwargs["model"], optimizer, None if saved is None else json.loads(saved))
        self.peer.leave_at_exit()  # the Trainer does not notify callbacks of a failed training
        self._losses: list[torch.Tensor] = []
        self._hook = kwargs["model"].register_forward_hook(self._take_loss, with_kwargs=True)

    def _take_loss(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Keep the loss of a micro-batch, as the Trainer tells callbacks the loss every ``logging_steps`` only."""
        found = output.get("loss") if isinstance(output, Mapping) else None
        if module.training and isinstance(found, torch.Tensor) and found.dim() == 0:
            self._losses.append(found.detach())
            self._is_share = (
                kwargs.get("num_items_in_batch") is not None
            )  # it is then divided by the whole batch's items

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update gossipx's state within the Trainer's state, since a checkpoint may follow; it does after a signal."""
        if self.peer is not None and self.peer.asked:
            self._stops = control.should_save = control.should_training_stop = True
        if self.peer is not None and self._losses:
            if self.peer.iteration % self._joining.run.run.log_interval == 0:
                loss = torch.stack(self._losses).sum()
                self.peer.log("train/loss", loss if self._is_share else loss / len(self._losses))
            self._losses.clear()
            self._has_loss = True
        if self.peer is not None and state.is_world_process_zero:
            state.stateful_callbacks[STATE_KEY] = json.dumps(self.peer.state_dict())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the finish; after a signal, leave with the checkpoint that the Trainer has just saved."""
        if self.peer is not None and self._stops:
            self.peer.leave_saved(f"{args.output_dir}/checkpoint-{state.global_step}")
        self._hook.remove()
        super().on_train_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss of a model whose output has none."""
        if self.peer is not None and "loss" in (logs or {}) and not self._has_loss:
            self.peer.log("train/loss", logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Record the accuracy."""
        self._record_accuracy(metrics)


GossipCallback = PeerTrainerCallback
"""The name by which scripts import it."""
