"""The SyncManager: decides after each iteration whether to pull a model (Adaptive Communication, section IV)."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.policies import Observation, Policy


@dataclass
class _Counters:
    """What is counted from the last retrieval."""

    delta: float = 0.0  # Δ_r
    travelled: float = 0.0
    silence: int = 0
    shared: bool = False


class SyncManager:
    """Asks the policy, and keeps what policies count from the last retrieval.

    The count starts anew when a request goes out. If that request fails it is as if it had never gone out: Δ_r is again
    what it was, and the way travelled goes on from the earlier start.

    A wave counts as one request, whoever started it: Δ_r is reset as one begins to take part. Each model that it brings
    counts as one retrieval, so that figures of pulls and of waves compare.

    Args:
        policy: see :mod:`gossipx.policies`.
        seed: of the coin that ``Observation.uniform`` shows.

    Attributes:
        retrievals: models of others that were mixed; those that others pushed, too.
        skipped: decisions that fell while an exchange was under way, or when nobody could be asked or all said no.
        failed: exchanges that were begun and not completed, and waves in which nobody was met.
    """

    def __init__(self, policy: Policy, seed: int = 0):
        self.policy = policy
        self.retrievals = 0
        self.skipped = 0
        self.failed = 0
        self._coin = random.Random(seed)
        self._policy_state = policy.init()
        self._since = _Counters()
        self._before_request: _Counters | None = None
        self._delta = 0.0

    @property
    def in_flight(self) -> bool:
        """Whether a pull is under way."""
        return self._before_request is not None

    @property
    def difference(self) -> float:
        """``|Δ_t − Δ_r|`` after the last step."""
        return abs(self._delta - self._since.delta)

    def step(self, step: int, delta: float, drift: float | None = None) -> bool:
        """Note one finished iteration and decide whether to pull now.

        Args:
            step: t, from 1.
            delta: Δ_t (Eq. 6).
            drift: ‖x_t − x_r‖₂, for policies that use it.

        Returns:
            True if a request is to go out now; the caller then calls :meth:`requested`.
        """
        self._delta = delta
        self._since.travelled += delta
        self._since.silence += 1
        observation = Observation(
            step=step,
            delta=delta,
            delta_at_retrieval=self._since.delta,
            travelled=self._since.travelled,
            drift=drift,
            silence=self._since.silence,
            uniform=self._coin.random(),
            shared=self._since.shared,
        )
        wanted, self._policy_state = self.policy.decide(self._policy_state, observation)
        if self.policy.max_silence and self._since.silence >= self.policy.max_silence:
            wanted = True
        if not wanted or step <= self.policy.warmup:
            return False
        if self.in_flight:
            self.skipped += 1
            return False
        return True

    def requested(self, *, shared: bool = False) -> None:
        """A pull goes out now, or (``shared``) a wave begins: count from here."""
        self._before_request = self._since
        self._since = _Counters(delta=self._delta, shared=shared)

    def completed(self, models: int = 1) -> None:
        """The exchange that was under way is over, and brought so many models of others, which are mixed."""
        self._before_request = None
        self.retrievals += models

    def retrieved(self) -> None:
        """A model that came without a decision of ours is mixed."""
        self.retrievals += 1

    def abandoned(self, *, failed: bool = True) -> None:
        """The pull that was under way came to nothing: count on from where it began.

        Args:
            failed: whether that counts as a failure (not when it was given up because training ended).
        """
        if self._before_request is None:
            return
        before, self._before_request = self._before_request, None
        self._since = _Counters(
            delta=before.delta,
            travelled=before.travelled + self._since.travelled,
            silence=before.silence + self._since.silence,
            shared=before.shared,
        )
        self.failed += failed

    def found_nobody(self) -> None:
        """The exchange that was decided could not begin, all said no: the decision counts as skipped."""
        self.abandoned(failed=False)
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain data. A pull under way counts as not begun."""
        since = self._since
        if self._before_request is not None:
            before = self._before_request
            travelled, silence = before.travelled + since.travelled, before.silence + since.silence
            since = _Counters(before.delta, travelled, silence, before.shared)
        version, words, gauss = self._coin.getstate()
        return {
            "policy": copy.deepcopy(self._policy_state),  # the policy may update its own in place
            "since": dataclasses.asdict(since),
            "delta": self._delta,
            "coin": [version, list(words), gauss],
            "counts": [self.retrievals, self.skipped, self.failed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        version, words, gauss = state["coin"]
        self._coin.setstate((version, tuple(words), gauss))
        self._policy_state = copy.deepcopy(state["policy"])
        self._since = _Counters(**state["since"])
        self._before_request = None
        self._delta = state["delta"]
        self.retrievals, self.skipped, self.failed = state["counts"]


def consensus_distance(squared_distances: Sequence[float], peers: int) -> float:
    """An estimate of D, how far a peer's model is from the mean of all (Adaptive Communication, Eq. 8).

    No peer ever sees that mean; what it sees is ‖x_j − x_i‖ to those that it pulled from. With e_i the deviation of
    x_i from the mean, and Σ e_i = 0: Σ_{i≠j} ‖x_i − x_j‖² = Σ_i ‖e_i‖² + N ‖e_j‖². For exchangeable peers each ‖e_i‖²
    is D² in expectation, so that (N − 1) · mean ‖x_i − x_j‖² = 2N · D²: the square of this estimate is unbiased.

    Args:
        squared_distances: ‖x_j − x_i‖² of some retrievals from peers drawn at random.
        peers: N.

    Returns:
        √((N − 1) / (2N) · mean of the squares), in the units of the weights; NaN of no retrievals.
    """
    if not squared_distances:
        return math.nan
    mean = math.fsum(squared_distances) / len(squared_distances)
    return math.sqrt((peers - 1) / (2 * peers) * mean)
