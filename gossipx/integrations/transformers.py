"""A callback that makes each training of the Hugging Face Trainer a peer."""

from __future__ import annotations

import json
from typing import Any

from gossipx.errors import UsageError
from gossipx.integrations.accelerate import check_whole
from gossipx.integrations.callback import PeerCallback

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise UsageError(f"transformers cannot be imported ({error}): pip install 'gossipx[transformers]'") from error

KEPT = "gossipx"
"""Where the Trainer's state holds gossipx's."""


class GossipCallback(PeerCallback, TrainerCallback):
    """Make a training by the Hugging Face Trainer a peer; nothing else changes.

    ``train`` joins before its first batch and ends with the finish. Under DDP the processes of a training are one peer.
    The Trainer's checkpoints hold gossipx's state, too, in ``trainer_state.json``, so that
    ``train(resume_from_checkpoint=...)`` goes on from there.

    Under ``gossipx run`` nothing has to be given.

    Args:
        peers, policy, rank, config_file, settings: as for :func:`gossipx.join`.
        evaluate: gives the model's accuracy from 0 to 1, for the figures before and after the finish.
        accuracy: name of a metric of the Trainer's evaluation, ``eval_accuracy``, to be recorded as ``test/accuracy``.

    Attributes:
        peer: the peer, from the first batch on.
    """

    # --- what the Trainer calls ---------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All is in its place: the model on its device and in DDP, checkpoints loaded."""
        check_whole(args.distributed_state.distributed_type)
        if self.peer is not None:
            self.peer.leave()  # of a training that failed
        kept = state.stateful_callbacks.get(KEPT)
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # of Accelerate's wrapper
        self.peer = self._joining.join(kwargs["model"], optimizer, None if kept is None else json.loads(kept))
        self.peer.copy_state()
        self.peer.leave_at_exit()  # the Trainer tells nobody that a training has failed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state where the Trainer writes it, as a checkpoint may come next."""
        if self.peer is not None and state.is_world_process_zero:
            state.stateful_callbacks[KEPT] = json.dumps(self.peer.state_dict())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss."""
        if self.peer is not None and "loss" in (logs or {}):
            self.peer.log("train/loss", logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Record the accuracy."""
        self._record_accuracy(metrics)
