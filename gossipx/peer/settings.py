"""The settings of one peer's role. Those of a whole run are :mod:`gossipx.settings.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PeerSettings:
    """The behaviour of one peer.

    Attributes:
        peer_timeout: seconds after which an unresponsive peer is no longer waited for. Every deadline except those of
            models is this or a fixed share of it. 30 s is several times what a model of 100 MB takes at 100 Mbit/s, and
            short enough for a person to wait.
        model_timeout: seconds that a model transfer may take before any was measured; peer_timeout if that is more.
        max_served: number of pulls answered at a time.
        max_pushes: number of pushes taken in at a time, from acceptance to the mix.
        serve_share: share of training time that answering pulls may take; 1: no limit.
        exchange: what starts when the policy fires: an exchange with one peer, or a wave of all.
        mode: ``pull``: fetch another peer's model; ``push``: send ours; ``pushpull``: average a pair.
        fragments: number of fragments of the model, of which each exchange moves one; 1: exchanges move all of it.
        push_sum: a push transfers half of the push-sum weight, which preserves the average on directed graphs too.
        blocking: training waits for each exchange or wave, as Algorithms 1 and 2 are printed, instead of continuing
            meanwhile.
        finish: ``consensus``: average all models at the end; ``none``: do not, as in the paper.
        finish_timeout: seconds that a peer whose training is over waits for peers that still train; 0: as long as they
            make progress.
        init: ``first``: all start with one peer's weights; ``own``: each with its own, as Algorithm 2 is printed.
        closed: why no peer can join the run while it is in progress; empty: one can.
        min_peers: stop (exit code 4) when fewer peers are left, including this one; 1: continue alone.
    """

    peer_timeout: float = 30.0
    model_timeout: float = 0.0
    max_served: int = 4
    max_pushes: int = 1
    serve_share: float = 0.03
    exchange: Literal["pulls", "waves"] = "pulls"
    mode: Literal["pull", "push", "pushpull"] = "pull"
    fragments: int = 1
    push_sum: bool = False
    blocking: bool = False
    finish: Literal["consensus", "none"] = "consensus"
    finish_timeout: float = 0.0
    init: Literal["first", "own"] = "first"
    min_peers: int = 1
    closed: str = ""
