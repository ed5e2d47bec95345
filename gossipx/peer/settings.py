"""The settings of one peer's role; those of a run are :mod:`gossipx.config.settings`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PeerSettings:
    """How a peer behaves.

    Attributes:
        peer_timeout: seconds after which another peer is no longer waited for. Every deadline but a model's is this or
            a fixed share of it. 30 s: several times what a model of 100 MB takes at 100 Mbit/s, short enough for a
            person to wait.
        model_timeout: seconds that a model may take on its way if that is more, and none was measured yet.
        max_served: pulls that are answered at a time.
        max_pushes: that are taken in at a time, from their acceptance to the mix.
        serve_share: of training's time that answering pulls may take; 1: no limit.
        exchange: what a policy that fires begins: an exchange with one other peer, or a wave of all.
        mode: ``pull``: fetch another's model; ``push``: have another fetch ours; ``pushpull``: average a pair.
        push_sum: a push gives away half of one's weight, so that the average is kept on directed graphs too.
        blocking: wait for each exchange, as Algorithm 2 is printed, or each wave, instead of training on meanwhile.
        finish: ``consensus``: average all models at the end; ``none``: do not, as in the paper.
        init: ``first``: all begin with one peer's weights; ``own``: each with its own, as Algorithm 2 is printed.
        min_peers: stop (exit code 4) when fewer are left, oneself included; 1: go on alone.
    """

    peer_timeout: float = 30.0
    model_timeout: float = 0.0
    max_served: int = 4
    max_pushes: int = 1
    serve_share: float = 0.03
    exchange: Literal["pulls", "waves"] = "pulls"
    mode: Literal["pull", "push", "pushpull"] = "pull"
    push_sum: bool = False
    blocking: bool = False
    finish: Literal["consensus", "none"] = "consensus"
    init: Literal["first", "own"] = "first"
    min_peers: int = 1
