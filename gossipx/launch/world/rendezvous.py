"""The rendezvous: the processes of a run exchange addresses and settings through torch's TCPStore before training.

Under torchrun it is the store of torchrun's agent, as for torch.distributed's ``env://``; elsewhere rank 0 hosts a
store until all have met. The store has no authentication: only addresses, names and settings pass through it, as JSON
that is checked before use, and no models. The peers themselves authenticate each other by a secret or certificates.
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

from gossipx.errors import GossipxError, UsageError, printable
from gossipx.launch.environment import ENV_MASTER
from gossipx.launch.hosts import is_loopback_name
from gossipx.launch.world.launchers import LaunchWorld

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
log = logging.getLogger("gossipx")

TELL_AFTER = 10.0
"""Seconds of waiting after which a warning names the missing ranks."""
LINGER = 10.0
"""Maximum seconds for which rank 0 keeps its store open after the rendezvous has failed, so that late ranks can read
the reason."""
POLLS = (0.01, 0.5)
"""Shortest and longest pause between two polls of the store, in seconds. A poll is two requests, so with the longest
pause 1,000 ranks send about 4,000 requests per second."""
MOST_TEXT = 1 << 20
"""Maximum bytes of a value that a rank publishes."""
_CONNECT = 5.0  # seconds of one attempt to connect to rank 0
_SHOWN = 500  # characters shown of another rank's error
# Number of this process's rendezvous so far. All ranks must count alike, because it is part of the keys' prefix.
_joins = itertools.count()


class RemoteAbortError(GossipxError):
    """Raised when another rank has aborted; this rank exits with the same code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


class Rendezvous:
    """A store through which all ranks exchange values, until each has what it needs; a context manager.

    An exception that leaves the block aborts the rendezvous: every other rank raises it as a RemoteAbortError.

    Attributes:
        own_host: address of this machine on the connection to rank 0.
        reached: address of rank 0 on that connection.
        mark: identifies this rendezvous in all attempts of the job; empty: nothing does.

    Args:
        world: rank and size of this process, and where rank 0 listens.
        timeout: seconds for the whole rendezvous.

    Raises:
        UsageError: rank 0's host is unknown, or two processes have the same rank.
        GossipxError: rank 0 cannot be reached in time, or its port is in use.
    """

    def __init__(self, world: LaunchWorld, timeout: float):
        self.world = world
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._place = f"{world.master}:{world.port}"
        self._hosts_store = world.size > 1 and not world.hosted and world.rank == 0
        self.own_host = self.reached = "127.0.0.1"
        number, token = next(_joins), secrets.token_hex(8)
        self._store: Store | None = self._open(f"gossipx/{world.run}/{number}/")
        self.mark = f"{world.job}/{number}" if world.source == "srun" else ""
        if world.hosted:  # by the agent of torchrun, which outlives its attempts
            own = self._do(lambda store: store.underlying_store.compare_set(f"gossipx/{world.job}/{number}", "", token))
            self.mark = own.decode()
        first = self._do(lambda store: store.compare_set(f"here/{world.rank}", "", token))
        if first != token.encode():
            error = UsageError(
                f"two processes got rank {world.rank} from {world.source}, or another run uses {self._place} too: give"
                f" each process its own rank, and each run its own port, {_how_to_set_port(world)}"
            )
            self._give_up(error)
            raise error

    # --- values -------------------------------------------------------------------------------------

    def publish(self, key: str, value: Any) -> None:
        """Publish a value of this rank; ``value`` must be serializable as JSON."""
        self._do(lambda store: store.set(f"{key}/{self.world.rank}", json.dumps(value)))

    def get(self, key: str, rank: int = 0) -> Any:
        """Wait for the value that ``rank`` publishes, and return it.

        Raises:
            GossipxError: it did not arrive in time, or a rank has aborted.
        """
        return self._wait(key, [rank])[0]

    def gather(self, key: str) -> list[Any]:
        """Wait for the values that all ranks publish, and return them by rank.

        Raises:
            GossipxError: some did not arrive in time (names the ranks), or a rank has aborted.
        """
        return self._wait(key, range(self.world.size))

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
            self._store = None  # frees the port, if this is rank 0's store

    # --- the end ------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Leave; rank 0, if it hosts the store, first waits until all others have what they need."""
        with contextlib.suppress(GossipxError):
            self.publish("done", True)
            if self._hosts_store:
                self.gather("done")

    def _give_up(self, error: BaseException) -> None:
        """Publish the error, so that every other rank raises it.

        If rank 0 hosts the store, it then waits until each other rank has read the error and set ``heard/RANK``.
        """
        text = str(error) if isinstance(error, GossipxError) else type(error).__name__
        code = error.exit_code if isinstance(error, GossipxError) else 130 if _interrupts(error) else 1
        failure = json.dumps({"rank": self.world.rank, "text": text, "exit": code})
        with contextlib.suppress(GossipxError):
            self._do(lambda store: store.set("failed", failure))
            self._do(lambda store: store.set(f"heard/{self.world.rank}", "1"))
            if self._hosts_store and not _interrupts(error):
                late = self._left() < 0  # then do not wait for ranks that never arrived
                others = [rank for rank in range(1, self.world.size) if not late or self._has(f"here/{rank}")]
                self._deadline = time.monotonic() + LINGER
                self._until(lambda store: all(store.check([f"heard/{rank}"]) for rank in others))

    def _check_failed(self) -> None:
        if not self._has("failed"):
            return
        failure = _json(self._read("failed"))
        self._do(lambda store: store.set(f"heard/{self.world.rank}", "1"))
        if not isinstance(failure, dict) or not isinstance(failure.get("exit"), int):
            failure = {}
        text = printable(str(failure.get("text", "an error")), _SHOWN)
        raise RemoteAbortError(f"rank {failure.get('rank', '?')} aborted: {text}", failure.get("exit", 1) % 256 or 1)

    # --- the store ----------------------------------------------------------------------------------

    def _wait(self, key: str, ranks: Sequence[int]) -> list[Any]:
        keys = [f"{key}/{rank}" for rank in ranks]

        def missing() -> str:
            lacking = [rank for rank in ranks if not self._has(f"{key}/{rank}")]
            shown = ", ".join(map(str, lacking[:10])) + (" and others" if len(lacking) > 10 else "")
            return f"{'rank' if len(lacking) == 1 else 'ranks'} {shown} of {self.world.size}"

        warn_at = time.monotonic() + TELL_AFTER

        def are_present(store: Store) -> bool:
            nonlocal warn_at
            self._check_failed()
            if store.check(keys):
                return True
            if time.monotonic() > warn_at:
                warn_at = math.inf
                log.warning("waiting for %s", missing())
            return False

        if not self._until(are_present):
            attempt = self.world.attempt
            again = f"this is attempt {attempt}, for which the launcher has to start all again; " if attempt else ""
            raise GossipxError(
                f"{missing()} did not reach {self._place} within {self._timeout:g} s: {again}check their output, or"
                " increase --rendezvous-timeout"
            )
        return [_json(self._read(name)) for name in keys]

    def _until(self, condition: Callable[[Store], bool]) -> bool:
        """Poll the store until the condition is true; return False at the deadline."""
        pause, longest = POLLS
        while not self._do(condition):
            if time.monotonic() > self._deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def _has(self, key: str) -> bool:
        return self._do(lambda store: bool(store.check([key])))

    def _read(self, key: str) -> bytes:
        return self._do(lambda store: bytes(store.get(key)))

    def _do(self, request: Callable[[Any], T]) -> T:
        """Send the store a request; raise GossipxError if the store is gone."""
        store = self._store
        assert store is not None
        try:
            return request(store)
        except RuntimeError as error:
            raise GossipxError(
                f"lost the connection to rank 0's store at {self._place}: {_line(error)}; check the output of rank 0"
            ) from error

    def _open(self, prefix: str) -> Store:
        try:
            from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
        except ImportError:
            raise UsageError("this torch was built without torch.distributed: list the peers in a hosts file") from None
        if self.world.size == 1 and not self.world.hosted:
            return PrefixStore(prefix, HashStore())
        world = self.world
        if world.master is None:
            raise UsageError(
                f"{world.source} does not define the host of rank 0: set {ENV_MASTER}=host[:port] or MASTER_ADDR for"
                " all processes, as in mpirun -x MASTER_ADDR=host, mpiexec -genv MASTER_ADDR host or"
                " flux run --env=MASTER_ADDR=host"
            )
        host, port = world.master, world.port

        def store(listening: int | None = None) -> TCPStore:
            longest = timedelta(seconds=max(1.0, self._left()))
            serves = listening is not None
            # The other backend, libuv, takes no listening socket in older versions of torch.
            return TCPStore(host, port, None, serves, longest, False, master_listen_fd=listening, use_libuv=False)

        served = store(_listen(world).detach()) if self._hosts_store else None
        self.own_host, self.reached = self._reach(host, port)
        otherwise = (
            f"{self._place} is not a torch store: another program listens there, or another version of torch; give"
            f" another port, {_how_to_set_port(world)}"
        )
        return PrefixStore(prefix, served or _within(self._deadline, store, otherwise))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _reach(self, host: str, port: int) -> tuple[str, str]:
        """Connect to rank 0's port as soon as it is open, and return the addresses of this end and of the other end.

        Rank 0 does so too, which shows at once whether the host name given to the others is its own.
        """
        world = self.world
        pause, warn_at = 0.1, time.monotonic() + TELL_AFTER
        while True:
            try:
                with socket.create_connection((host, port), max(0.1, min(_CONNECT, self._left()))) as probe:
                    ends = probe.getsockname(), probe.getpeername()
                if ends[0] != ends[1]:  # TCP may connect a socket to itself if its ephemeral port is the target
                    return ends[0][0].partition("%")[0], ends[1][0].partition("%")[0]
                cause = "connection refused"
            except (OSError, UnicodeError) as error:
                cause = (getattr(error, "strerror", None) or str(error)).lower()
            if self._left() < 0:
                raise GossipxError(
                    f"rank {world.rank} cannot reach rank 0 at {self._place} ({world.master_from}) within"
                    f" {self._timeout:g} s: {cause}; set {ENV_MASTER}=host[:port] if rank 0 is elsewhere, or"
                    " increase --rendezvous-timeout"
                )
            if time.monotonic() > warn_at:
                warn_at = math.inf
                log.warning("waiting for rank 0 at %s (%s): %s", self._place, world.master_from, cause)
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


def _listen(world: LaunchWorld) -> socket.socket:
    """Return a socket that listens on rank 0's port: on loopback if all processes are on one machine, else on all
    addresses."""
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
            f"rank 0 cannot listen on port {world.port} for the rendezvous: {error.strerror}; give another port,"
            f" {_how_to_set_port(world)}"
        ) from error
    return listening


def _how_to_set_port(world: LaunchWorld) -> str:
    """Return the end of a message that says how the user sets the port."""
    if world.source == "torchrun" and world.hosted:
        return "by torchrun's --master-port or --rdzv-endpoint"
    host = world.master if world.master and not is_loopback_name(world.master) else "host"
    return f"by {ENV_MASTER}={host}:PORT for all processes"


def _within(deadline: float, call: Callable[[], T], otherwise: str) -> T:
    """Return the result of ``call``, which runs in a thread because it may ignore the deadline.

    Raises:
        GossipxError: with the message ``otherwise``, if it fails or takes longer.
    """
    results: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except RuntimeError as error:
            results.put(error)

    threading.Thread(target=run, name="gossipx-store", daemon=True).start()
    try:
        result = results.get(timeout=max(1.0, deadline - time.monotonic()))
    except queue.Empty:
        raise GossipxError(otherwise) from None
    if isinstance(result, RuntimeError):
        raise GossipxError(otherwise) from result
    return result


def _json(data: bytes) -> Any:
    try:
        if len(data) <= MOST_TEXT:
            return json.loads(data)
    except ValueError:
        pass
    raise GossipxError("invalid data at the rendezvous: does another program use this port?")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_SHOWN]


def _interrupts(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)
