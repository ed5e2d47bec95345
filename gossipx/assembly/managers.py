"""Managers of a script's own in place of a peer's: subclasses of the built-in ones, or objects with their interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossipx import policies
from gossipx.comm import CommManager
from gossipx.errors import UsageError
from gossipx.metrics.recorder import Recorder
from gossipx.policies import Policy
from gossipx.sync import SyncManager

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    SyncManager: ("policy", "observation", "fired", "decisions", "retrievals", "skipped", "failed", "accumulated"),
    CommManager: ("trust",),
}
"""Public attributes that the built-in managers get when they are made, beside their methods."""
OPTIONAL = ("forget", "join_handler")
"""Members of CommManager that another object may lack: without them nobody joins the run through this peer."""
POLICY_OF_OBJECT = ":policy="
"""Separates, in the recorded name of a class of a script's own, the class from the policy that it was made with."""


@dataclass(frozen=True)
class Managers:
    """The managers and the recorder that a script passes to :func:`gossipx.join`; None: the built-in one.

    Attributes:
        sync: a subclass of SyncManager, which is called with a policy and a seed, or an object with its interface.
        comm: a subclass of CommManager, or a function: called with CommManager's arguments by keyword, it returns an
            object with its interface.
        recorder: records the curves, in place of the configured recorders.
    """

    sync: Any = None
    comm: Callable[..., Any] | None = None
    recorder: Recorder | None = None

    def sync_manager(self, policy: Policy, seed: int) -> SyncManager:
        """Return the SyncManager of a peer.

        Args:
            policy: of the run; an object has one of its own.

        Raises:
            UsageError: the script's lacks a part of the interface, or takes other arguments.
        """
        if self.sync is None:
            return SyncManager(policy, seed)
        wanted = "a subclass of gossipx.SyncManager or an object with its methods"
        made: SyncManager = self.sync
        if isinstance(self.sync, type):
            if not issubclass(self.sync, SyncManager):
                raise UsageError(f"sync_manager= is the class {self.sync.__name__}: give {wanted}")
            made = _make(self.sync, SyncManager, "sync_manager", wanted, policy, seed)
        _check(made, SyncManager, "sync_manager", wanted)
        if not isinstance(own := getattr(made, "policy", None), Policy):
            types = f"{type(made).__name__} has a policy of type {type(own).__name__}"
            raise UsageError(f"sync_manager= of type {types}: give it one such as gossipx.policies.parse('tau:10')")
        return made

    def comm_manager(self, **arguments: Any) -> CommManager:
        """Return the CommManager of a peer; errors as for :meth:`sync_manager`."""
        if self.comm is None:
            return CommManager(**arguments)
        wanted = "a subclass of gossipx.CommManager, or a function that takes its arguments and returns such an object"
        if not callable(self.comm):
            raise UsageError(f"comm_manager= is of type {type(self.comm).__name__}: give {wanted}")
        made: CommManager = _make(self.comm, CommManager, "comm_manager", wanted, **arguments)
        _check(made, CommManager, "comm_manager", wanted)
        return made

    def describe(self, policy: str) -> str:
        """Return the name under which a run records its policy, given that of the configured one."""
        if self.sync is None:
            return policy
        if isinstance(self.sync, type):
            return f"object {self.sync.__name__}{POLICY_OF_OBJECT}{policy}"
        return f"object {type(self.sync).__name__}"

    def configured(self, policy: str) -> str:
        """Return the spec of the policy for a SyncManager, from a setting that may be the description of one."""
        if self.sync is None or not policies.is_object(policy):
            return policy
        return policy.partition(POLICY_OF_OBJECT)[2] or "never"  # an object has a policy of its own


def _make(maker: Callable[..., Any], kind: type, argument: str, wanted: str, *given: Any, **named: Any) -> Any:
    """Call ``maker``, if it takes the arguments; an error in its own code is the script's, and keeps its traceback."""
    try:
        inspect.signature(maker).bind(*given, **named)
    except (TypeError, ValueError) as error:  # ValueError: a built-in class without a signature
        name = getattr(maker, "__name__", type(maker).__name__)
        raise UsageError(
            f"{argument}= {name} does not take {kind.__name__}'s arguments ({error}): give {wanted}"
        ) from None
    return maker(*given, **named)


def _check(made: object, kind: type, argument: str, wanted: str) -> None:
    names = [*ATTRIBUTES[kind], *(name for name in vars(kind) if not name.startswith("_") and name not in OPTIONAL)]
    # A property may not have a value yet, so it is looked for by name; an object that stands for another has no names.
    missing = [name for name in names if name not in dir(made) and not hasattr(made, name)]
    if missing:
        raise UsageError(f"{argument}= of type {type(made).__name__} has no '{missing[0]}': give {wanted}")
