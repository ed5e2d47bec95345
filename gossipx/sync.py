"""The SyncManager, which decides after each iteration whether to pull a model (Adaptive Communication, section IV)."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gossipx.policies import Observation, Policy, describe, parse

QUIET = 100
"""Warn after this many iterations without an exchange, early enough to correct a short run."""
PERIODS = 3
"""Warn only after this multiple of the longest earlier pause, so that a policy that is meant to fire less and less
often causes no warning."""
SKIPS = 10
"""Warn after this many skipped decisions, if they are also a large share of all. A few are normal at the start of a
run, while connections are being made."""
SKIPPED_SHARE = 0.2
"""Warn from this share of skipped decisions on: ``tau:10`` then exchanges less often than ``tau:12``."""


@dataclass
class _SinceRetrieval:
    """Counters since the last retrieval, which the policy sees as an :class:`~gossipx.policies.Observation`."""

    delta: float = 0.0  # Δ_r: Δ_t when the last request was sent; 0 before the first
    travelled: float = 0.0  # the sum of Δ_t
    silence: int = 0  # iterations
    shared: bool = False  # whether it was a wave or a pair


class _Decisions:
    """A policy's decisions since this process began, after the warm-up, and their outcomes.

    Attributes:
        overtaken: number of decisions that found an exchange in flight.
        declined: number of decisions that found all other peers busy.
        warned_of_silence: whether the warning about silence has been given or is not needed.
    """

    def __init__(self, policy: Policy):
        self.warned_of_silence = not policy.depends_on_model or policy.max_silence > 0
        self.overtaken = 0
        self.declined = 0
        self._policy = policy
        self._made = 0  # decisions to exchange
        self._silence = 0  # iterations since the last of them
        self._longest = 0  # such silence before
        self._last: Observation | None = None
        self._warned_of_skips = False

    def observe(self, observation: Observation, wanted: bool) -> None:
        """Count an iteration, and whether the policy ``wanted`` an exchange."""
        self._last = observation
        self._made += wanted
        self._silence += 1
        if wanted:
            self._longest, self._silence = max(self._longest, self._silence), 0

    def warnings(self) -> dict[str, str]:
        """See :meth:`SyncManager.warnings`."""
        found = {}
        if not self.warned_of_silence and self._last is not None and self._is_silent(self._last):
            self.warned_of_silence = True
            since = f", since iteration {self._last.step - self._silence}" if self._made else ""
            found["quiet"] = (
                f"{describe(self._policy)} has not fired in {self._silence} iterations{since}:"
                f" {self._policy.explain(self._last)}; lower its threshold, or give max_silence=N"
            )
        skipped = self.overtaken + self.declined
        if not self._warned_of_skips and skipped >= SKIPS and skipped >= SKIPPED_SHARE * self._made:
            self._warned_of_skips = True
            found["skipped"] = (
                f"{skipped} of {self._made} decisions to exchange were skipped, {self.overtaken} during an exchange and"
                f" {self.declined} with all other peers busy: steps are faster than exchanges; let the policy fire less"
                " often, or give --blocking"
            )
        return found

    def _is_silent(self, last: Observation) -> bool:
        """Return whether no exchange has begun for long, by the policy or by another peer, such as in a wave."""
        return min(self._silence, last.silence) >= max(QUIET, PERIODS * self._longest)


class SyncManager:
    """The owner of a policy and its state, and of the counters since the last retrieval that policies use.

    The counters restart when a request is sent. If the request fails, they continue as if it had never been sent, with
    the earlier Δ_r.

    A wave counts as one request, also if another peer started it; Δ_r is set when this peer joins it. Each model
    received in a wave counts as one retrieval, so that statistics of pulls and waves are comparable.

    Args:
        policy: what :func:`gossipx.policies.parse` accepts: a spec such as ``tau:10``, a policy or a function.
        seed: seeds ``Observation.uniform``.

    Raises:
        UsageError: the policy is something else, or its spec is wrong.

    Attributes:
        policy: the policy.
        observation: the observation of the last step, with Δ_r as it was when the policy decided; None before the first
            step.
        fired: whether :meth:`step` last told the caller to exchange.
        decisions: number of decisions to exchange after the warm-up, including skipped ones.
        retrievals: number of mixed models of other peers, including pushed ones.
        skipped: number of decisions to pull that had no effect, because an exchange was in flight or no peer was
            available or willing.
        failed: number of exchanges that did not complete, and of waves that met no other peer.
        accumulated: for the last completed exchange, ``retrievals`` with it, and the sum of Δ_t from the request
            before it to its own (Figure 3).
    """

    def __init__(self, policy: str | Policy | Callable[[Observation], bool], seed: int = 0):
        self.policy = parse(policy)
        self.observation: Observation | None = None
        self.fired = False
        self.decisions = 0
        self.retrievals = 0
        self.skipped = 0
        self.failed = 0
        self.accumulated = (0, 0.0)
        self._coin = random.Random(seed)
        self._policy_state = self.policy.init()
        self._since = _SinceRetrieval()
        self._before_request: _SinceRetrieval | None = None
        self._delta = 0.0
        self._decisions = _Decisions(self.policy)

    @property
    def in_flight(self) -> bool:
        """Whether a pull is in flight."""
        return self._before_request is not None

    def step(self, step: int, delta: float, drift: float | None = None) -> bool:
        """Record one finished iteration and decide whether to pull now.

        Args:
            step: t, from 1.
            delta: Δ_t, how far the iteration moved the model (Eq. 6).
            drift: ‖x_t − x_r‖₂, how far the model is from that of the last request; for policies that use it.

        Returns:
            True if the caller should send a request now; it then calls :meth:`requested`.
        """
        self._delta = delta
        self._since.travelled += delta
        self._since.silence += 1
        self.observation = observation = Observation(
            step=step,
            delta=delta,
            delta_at_retrieval=self._since.delta,
            travelled=self._since.travelled,
            drift_measured=drift,
            silence=self._since.silence,
            uniform=self._coin.random(),
            shared=self._since.shared,
        )
        wanted, self._policy_state = self.policy.decide(self._policy_state, observation)
        if self.policy.max_silence and self._since.silence >= self.policy.max_silence:
            wanted = True
        self.fired = False
        if step <= self.policy.warmup:
            return False
        self._decisions.observe(observation, wanted)
        self.decisions += wanted
        if wanted and self.in_flight:
            self.skipped += 1
            self._decisions.overtaken += 1
            return False
        self.fired = wanted
        return wanted

    def warnings(self) -> dict[str, str]:
        """Return the new warnings about the decisions so far, by topic; each topic is returned once."""
        return self._decisions.warnings()

    def requested(self, *, shared: bool = False) -> None:
        """Record that a pull was sent or, if ``shared``, that a wave or a pair began; restart the counters."""
        self._before_request = self._since
        self._since = _SinceRetrieval(delta=self._delta, shared=shared)

    def completed(self, models: int = 1) -> None:
        """Record that the exchange in flight has ended after mixing ``models`` models of other peers."""
        before, self._before_request = self._before_request, None
        self.retrievals += models
        if before is not None and models:
            self.accumulated = self.retrievals, before.travelled

    def retrieved(self) -> None:
        """Record that a model was mixed that this peer had not requested, such as a pushed one."""
        self.retrievals += 1

    def abandoned(self, *, failed: bool = True) -> None:
        """Record that the exchange in flight has failed, and restore the counters as if it had never begun.

        Without an exchange in flight this has no effect.

        Args:
            failed: whether to count it as failed; False, for example, if it was cancelled because training ended.
        """
        if self._before_request is None:
            return
        before, self._before_request = self._before_request, None
        self._since = _SinceRetrieval(
            delta=before.delta,
            travelled=before.travelled + self._since.travelled,
            silence=before.silence + self._since.silence,
            shared=before.shared,
        )
        self.failed += failed

    def found_nobody(self) -> None:
        """Record that no peer was available or willing, so that the decision counts as skipped."""
        self.abandoned(failed=False)
        self.skipped += 1
        self._decisions.declined += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next decision depends on, as plain data. A pull in flight counts as not begun."""
        since = self._since
        if self._before_request is not None:
            before = self._before_request
            travelled, silence = before.travelled + since.travelled, before.silence + since.silence
            since = _SinceRetrieval(before.delta, travelled, silence, before.shared)
        version, words, gauss = self._coin.getstate()
        return {
            "policy": copy.deepcopy(self._policy_state),  # the policy may update its state in place
            "since": dataclasses.asdict(since),
            "delta": self._delta,
            "coin": [version, list(words), gauss],
            "counts": [self.retrievals, self.skipped, self.failed, self.decisions],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        version, words, gauss = state["coin"]
        self._coin.setstate((version, tuple(words), gauss))
        self._policy_state = copy.deepcopy(state["policy"])
        self._since = _SinceRetrieval(**state["since"])
        self._before_request = None
        self._delta = state["delta"]
        self.retrievals, self.skipped, self.failed, self.decisions = state["counts"]
        self._decisions.warned_of_silence |= any(state["counts"])  # how long it was silent is not saved


def consensus_distance(squared_distances: Sequence[float], peers: int) -> float:
    """Estimate D, the distance of a peer's model from the mean of all models (Adaptive Communication, Eq. 8).

    No peer knows that mean, but each knows ‖x_j − x_i‖ to the peers that it pulled from. With e_i the deviation of x_i
    from the mean, and Σ e_i = 0: Σ_{i≠j} ‖x_i − x_j‖² = Σ_i ‖e_i‖² + N ‖e_j‖². For exchangeable peers E ‖e_i‖² = D², so
    (N − 1) · mean ‖x_i − x_j‖² = 2N · D² in expectation: the square of this estimate is unbiased.

    Args:
        squared_distances: ‖x_j − x_i‖² of retrievals from randomly drawn peers.
        peers: N, the number of peers.

    Returns:
        √((N − 1) / (2N) · mean of the squares), in the units of the weights; NaN without retrievals.
    """
    if not squared_distances:
        return math.nan
    mean = math.fsum(squared_distances) / len(squared_distances)
    return math.sqrt((peers - 1) / (2 * peers) * mean)
