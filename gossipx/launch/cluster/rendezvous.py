"""The processes of one run meet at torch's TCPStore, to tell each other where they listen and what they agree on.

Under torchrun that is its agent's store, as for torch.distributed's ``env://``; elsewhere rank 0 hosts one until all
have met. The store asks nobody who they are: what goes through it is addresses, names and settings as JSON, which are
looked at before they are used, and no model. Who may exchange models is for the peers' secret or certificates to say.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gossipx.errors import GossipxError, UsageError
from gossipx.launch.cluster.world import World, is_loopback
from gossipx.launch.environment import ENV_MASTER

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
log = logging.getLogger("gossipx")

TELL_AFTER = 10.0
"""Seconds of waiting after which a line says for whom."""
LINGER = 10.0
"""Seconds that rank 0 stays after its start has failed, so that the others hear why: they may come a little later."""
POLLS = (0.01, 0.5)
"""Seconds between two looks at the store, the first and the longest: a thousand ranks ask it 4,000 times a second."""
MOST_TEXT = 1 << 20
"""Characters of what one rank tells."""
_CONNECT = 5.0
_SHOWN = 500
_joins = itertools.count()


class RemoteAbortError(GossipxError):
    """Another rank has given up, and so does this one, with the same exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Rendezvous:
    """All ranks at one store, from the first's coming until all have what they need; a context manager.

    An error that leaves the block ends it for all ranks, each of which then raises it.

    Attributes:
        own: this machine's address on the way to rank 0; ``reached``: that of rank 0, as it was reached from here.

    Args:
        world: of this process.
        timeout: seconds from now to the end of it all.

    Raises:
        UsageError: nobody says where rank 0 is, or two processes have one rank.
        GossipxError: rank 0 cannot be reached in time, or its port is in use.
    """

    def __init__(self, world: World, timeout: float):
        self.world = world
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._place = f"{world.master}:{world.port}"
        self._hosts = world.size > 1 and not world.hosted and world.rank == 0
        self.own = self.reached = "127.0.0.1"
        self._store: Store | None = self._open(f"gossipx/{world.run}/{next(_joins)}/")
        mine = secrets.token_hex(8)
        taken = self._do(lambda store: store.compare_set(f"here/{world.rank}", "", mine))
        if taken != mine.encode():
            error = UsageError(
                f"two processes say that they are rank {world.rank} of {world.source}, or those of another run meet at"
                f" {self._place}, too: give each its own rank, and each run a port of its own, {_port_knob(world)}"
            )
            self._give_up(error)
            raise error

    # --- telling and asking -------------------------------------------------------------------------

    def tell(self, key: str, value: Any) -> None:
        """Tell all others; ``value`` can be written as JSON."""
        self._do(lambda store: store.set(f"{key}/{self.world.rank}", json.dumps(value)))

    def of(self, key: str, rank: int = 0) -> Any:
        """What one rank tells, once it does.

        Raises:
            GossipxError: it does not come in time, or has given up.
        """
        return self._wait(key, [rank])[0]

    def all(self, key: str) -> list[Any]:
        """What each rank tells, by rank.

        Raises:
            GossipxError: names those that did not come in time; or one has given up.
        """
        return self._wait(key, range(self.world.size))

    def first(self, key: str) -> bool:
        """Whether this rank is the first to ask for ``key``."""
        return bool(self._do(lambda store: store.add(f"first/{key}", 1)) == 1)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._leave()
            elif not isinstance(error, RemoteAbortError):
                self._give_up(error)
        finally:
            self._store = None  # where it is rank 0's, its port is free again

    # --- the end ------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Rank 0, whose store it may be, stays until all others have what they need."""
        with contextlib.suppress(GossipxError):
            self.tell("done", True)
            if self._hosts:
                self.all("done")

    def _give_up(self, error: BaseException) -> None:
        text = str(error) if isinstance(error, GossipxError) else type(error).__name__
        code = error.exit_code if isinstance(error, GossipxError) else 130 if _interrupts(error) else 1
        told = json.dumps({"rank": self.world.rank, "text": text, "exit": code})
        with contextlib.suppress(GossipxError):
            self._do(lambda store: store.set("failed", told))
            self._do(lambda store: store.set(f"heard/{self.world.rank}", "1"))
            if self._hosts and not _interrupts(error):
                late = self._left() < 0  # who has not come by now is not waited for
                others = [rank for rank in range(1, self.world.size) if not late or self._has(f"here/{rank}")]
                self._deadline = time.monotonic() + LINGER
                self._until(lambda store: all(store.check([f"heard/{rank}"]) for rank in others))

    def _check_failed(self) -> None:
        if not self._has("failed"):
            return
        told = _json(self._get("failed"))
        self._do(lambda store: store.set(f"heard/{self.world.rank}", "1"))
        if not isinstance(told, dict) or not isinstance(told.get("exit"), int):
            told = {}
        text = "".join(char for char in str(told.get("text", "an error")) if char.isprintable())[:_SHOWN]
        raise RemoteAbortError(f"rank {told.get('rank', '?')} gave up: {text}", told.get("exit", 1) % 256 or 1)

    # --- the store ----------------------------------------------------------------------------------

    def _wait(self, key: str, ranks: Sequence[int]) -> list[Any]:
        keys = [f"{key}/{rank}" for rank in ranks]

        def missing() -> str:
            lacking = [rank for rank in ranks if not self._has(f"{key}/{rank}")]
            shown = ", ".join(map(str, lacking[:10])) + (" and others" if len(lacking) > 10 else "")
            return f"{'rank' if len(lacking) == 1 else 'ranks'} {shown} of {self.world.size}"

        tell_at = time.monotonic() + TELL_AFTER

        def there(store: Store) -> bool:
            nonlocal tell_at
            self._check_failed()
            if store.check(keys):
                return True
            if time.monotonic() > tell_at:
                tell_at = math.inf
                log.warning("waiting for %s", missing())
            return False

        if not self._until(there):
            raise GossipxError(
                f"{missing()} did not come to {self._place} within {self._timeout:g} s: look at what they print, or"
                " give more by --rendezvous-timeout"
            )
        return [_json(self._get(name)) for name in keys]

    def _until(self, there: Callable[[Store], bool]) -> bool:
        pause, longest = POLLS
        while not self._do(there):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _has(self, key: str) -> bool:
        return self._do(lambda store: bool(store.check([key])))

    def _get(self, key: str) -> bytes:
        return self._do(lambda store: bytes(store.get(key)))

    def _do(self, ask: Callable[[Any], T]) -> T:
        """Ask the store something; it may have gone."""
        store = self._store
        assert store is not None
        try:
            return ask(store)
        except RuntimeError as error:
            raise GossipxError(
                f"lost rank 0's store at {self._place} while the peers met: {_line(error)}; look at what rank 0 prints"
            ) from error

    def _open(self, prefix: str) -> Store:
        try:
            from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
        except ImportError:
            raise UsageError("this torch was built without torch.distributed: give the peers in a hosts file") from None
        if self.world.size == 1:
            return PrefixStore(prefix, HashStore())
        world = self.world
        if world.master is None:
            raise UsageError(
                f"{world.source} does not say on which host rank 0 is: set {ENV_MASTER}=host[:port] or MASTER_ADDR for"
                " all processes, as in mpirun -x MASTER_ADDR=host"
            )
        host, port = world.master, world.port

        def store(listening: int | None = None) -> TCPStore:
            longest = timedelta(seconds=max(1.0, self._left()))
            serves = listening is not None
            return TCPStore(host, port, None, serves, longest, wait_for_workers=False, master_listen_fd=listening)

        served = store(_listen(world).detach()) if self._hosts else None
        self.own, self.reached = self._reach(host, port)
        otherwise = (
            f"what listens at {self._place} is no store of torch's: another program, or of another version; give"
            f" another port, {_port_knob(world)}"
        )
        return PrefixStore(prefix, served or _within(self._deadline, store, otherwise))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _reach(self, host: str, port: int) -> tuple[str, str]:
        """Connect to rank 0's port as soon as somebody listens there: the addresses of the two ends.

        Rank 0 does so, too: that its own host is what others are told is seen at once.
        """
        world = self.world
        pause, tell_at = 0.1, time.monotonic() + TELL_AFTER
        while True:
            try:
                with socket.create_connection((host, port), max(0.1, min(_CONNECT, self._left()))) as way:
                    ends = way.getsockname(), way.getpeername()
                if ends[0] != ends[1]:  # not connected to itself, as happens where nobody listens
                    return ends[0][0].partition("%")[0], ends[1][0].partition("%")[0]
                cause = "connection refused"
            except (OSError, UnicodeError) as error:
                cause = (getattr(error, "strerror", None) or str(error)).lower()
            if self._left() < 0:
                raise GossipxError(
                    f"rank {world.rank} cannot reach rank 0 at {self._place} ({world.master_from}) within"
                    f" {self._timeout:g} s: {cause}; set {ENV_MASTER}=host[:port] if that is not where rank 0 is, or"
                    " give more by --rendezvous-timeout"
                )
            if time.monotonic() > tell_at:
                tell_at = math.inf
                log.warning("waiting for rank 0 at %s (%s): %s", self._place, world.master_from, cause)
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _listen(world: World) -> socket.socket:
    """A socket at rank 0's port: on loopback where all processes are on one machine, else on all addresses."""
    assert world.master is not None
    if world.one_host:
        family, host = (socket.AF_INET6, "::1") if world.master == "::1" else (socket.AF_INET, "127.0.0.1")
    else:
        both = socket.has_dualstack_ipv6()
        family, host = (socket.AF_INET6, "::") if both else (socket.AF_INET, "0.0.0.0")
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listening.bind((host, world.port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise GossipxError(
            f"rank 0 cannot listen on port {world.port}, where the peers are to meet: {error.strerror}; give another"
            f" one, {_port_knob(world)}"
        ) from error
    return listening


def _port_knob(world: World) -> str:
    if world.source == "torchrun" and world.hosted:
        return "by torchrun's --master-port or --rdzv-endpoint"
    host = world.master if world.master and not is_loopback(world.master) else "host"
    return f"by {ENV_MASTER}={host}:PORT for all processes"


def _within(deadline: float, ask: Callable[[], T], otherwise: str) -> T:
    """What ``ask`` gives, in a thread: it may know no deadline.

    Raises:
        GossipxError: ``otherwise``; it fails, or takes longer.
    """
    answer: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

    def into() -> None:
        try:
            answer.put(ask())
        except RuntimeError as error:
            answer.put(error)

    threading.Thread(target=into, name="gossipx-store", daemon=True).start()
    try:
        got = answer.get(timeout=max(1.0, deadline - time.monotonic()))
    except queue.Empty:
        raise GossipxError(otherwise) from None
    if isinstance(got, RuntimeError):
        raise GossipxError(otherwise) from got
    return got


def _json(data: bytes) -> Any:
    try:
        if len(data) <= MOST_TEXT:
            return json.loads(data)
    except ValueError:
        pass
    raise GossipxError("what was told at the rendezvous is not gossipx's: does another program use this port?")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_SHOWN]


def _interrupts(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)
