"""A peer's requests on their way, and what comes by their answers."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gossipx.actor import Event, Failed, Fault, Replied
from gossipx.arena import ParameterArena
from gossipx.coded import Bringing, Coded, Taking
from gossipx.comm import CommManager
from gossipx.drive.lane import Lane
from gossipx.effects import Send
from gossipx.errors import (
    CancelledError,
    GossipxError,
    LocalFaultError,
    NotAuthorisedError,
    PeerTimeoutError,
    PeerUnreachableError,
    ProtocolError,
    RefusedError,
    UsageError,
)
from gossipx.incoming import Incoming
from gossipx.memory import Source
from gossipx.messages import (
    CarryingRequest,
    ElasticRequest,
    InitialRequest,
    ModelReply,
    ModelRequest,
    PullRequest,
    Reply,
    Request,
    TakeRequest,
)
from gossipx.server_messages import (
    CopyRequest,
    GradientRequest,
    RangesRequest,
    RecordRequest,
    TablesReply,
    TablesRequest,
)
from gossipx.snapshots import Snapshot
from gossipx.storage.desk import Copy, Desk, Gradient
from gossipx.storage.moving import Ranges
from gossipx.storage.rooms import Changed, Nothing, Tables
from gossipx.wire import Fitting, Sink


@dataclass
class Transfer:
    """A model on its way to us."""

    request: Request
    incoming: Incoming
    began: float
    distance: float = math.nan  # to what it is compared with, once all has come; NaN: it is poisoned
    seconds: float = 0.0
    their_step: int = 0
    weight: float = 1.0  # the number of models that are averaged in it
    cancel: Callable[[], None] | None = None  # once it was asked for; for the outbox alone
    taking: Taking | None = None  # where models have a codec
    bringing: Bringing | None = None  # ... and others bring theirs


@dataclass
class _Fetching:
    """Tables on their way to us."""

    place: tuple[int, int]
    sink: Tables | Changed


AboutTables = GradientRequest | TablesRequest | RecordRequest | CopyRequest | RangesRequest
"""What is about tables, or shards."""


class Transfers:
    """Sends requests, tells what came of them, and keeps what came, or was brought, until it is forgotten.

    Args:
        arena: whose models they are.
        rank: one's own, for the thread's name.
        tell: told Replied or Failed of each request, once.
        note: told of faults worth a line in the log, with their topic.
        fail: told of what ends training.

    Attributes:
        comm: set before the first request; None again once the peer is closed.
        desk: the peer's tables, in server mode.
        codec: of models; None: they travel as they are.
    """

    def __init__(
        self,
        arena: ParameterArena,
        rank: int,
        tell: Callable[[Event], None],
        note: Callable[[str, str], None],
        fail: Callable[[GossipxError], None],
    ):
        self.comm: CommManager | None = None
        self.desk: Desk | None = None
        self.codec: Coded | None = None
        self._arena = arena
        self._tell, self._note, self._fail = tell, note, fail
        self._transfers: dict[int, Transfer] = {}
        self._cancelled: set[int] = set()  # until they are forgotten
        self._gradients: dict[int, Gradient] = {}  # those that others brought and that were kept
        self._fetching: dict[int, _Fetching] = {}
        self._copies: dict[int, Copy] = {}
        self._cancels: dict[int, Callable[[], None]] = {}  # of requests about tables
        self._ranges: dict[int, Ranges] = {}
        # Handing a request to the CommManager wakes its threads, which would take the processor from a training step.
        self._outbox = Lane(f"gossipx-outbox-{rank}")

    # --- out --------------------------------------------------------------------------------------

    def send(self, send: Send, base: Snapshot | None) -> None:
        """Send a request.

        Args:
            base: what the model that is asked for is compared with, held by the caller, who gives that hold away here;
                None: it is kept as it comes. An elastic request brings it along.
        """
        if isinstance(send.request, AboutTables):  # parts of a model
            self._send_tables(send, send.request)
            return
        payload = brought = None
        if isinstance(send.request, ModelRequest):
            if isinstance(send.request, CarryingRequest):
                assert base is not None
                brought = base.hold()
            payload = Incoming(self._arena, base, whole=isinstance(send.request, InitialRequest))
            taking = None
            if self.codec is not None:
                taking = self.codec.taking(send.to, send.request, payload)
            self._transfers[send.ticket] = Transfer(send.request, payload, time.monotonic(), taking=taking)

        def done(result: Reply | GossipxError) -> None:
            if brought is not None:
                brought.release()
            self._replied(send.ticket, result)

        def post() -> None:
            comm = self.comm
            if comm is None or send.ticket in self._cancelled:  # none: the peer was closed meanwhile
                done(CancelledError("its request was not sent yet"))
                return
            try:
                request, sink, source = self._coded(send, payload, brought)
                cancel = comm.request(send.to, request, deadline=send.deadline, payload=sink, done=done, brought=source)
            except Exception as error:  # the role still has to hear of its request
                done(LocalFaultError(f"a request could not be sent: {error}"))
                return
            transfer = self._transfers.get(send.ticket)
            if transfer is not None:
                transfer.cancel = cancel

        if base is None:
            self.post(post)
        else:  # before that, nothing can be made of what comes
            base.when_settled(lambda: self.post(post))

    def _coded(
        self, send: Send, payload: Incoming | None, brought: Snapshot | None
    ) -> tuple[Request, Sink | Fitting | None, Source | None]:
        """A request as it leaves, what takes its answer in, and what it brings."""
        transfer = self._transfers.get(send.ticket)
        if self.codec is None or transfer is None or transfer.taking is None:
            return send.request, payload, None if brought is None else brought.source
        request, source = self.codec.asked(send.to, send.request, brought.buffer.vectors if brought else [])
        return request, transfer.taking, source

    def bringing(self, ticket: int) -> Bringing | None:
        """What has decoded the model that another has brought, and that is under ``ticket``; None: nothing had to."""
        transfer = self._transfers.get(ticket)
        return None if transfer is None else transfer.bringing

    def expect(self, send: Send) -> None:
        """A request is about to be sent: have room for the tables that it asks for, where they lie by now."""
        desk = self.desk
        match send.request:
            case TablesRequest(shard=shard, bucket=bucket) if bucket >= 0:
                assert desk is not None
                self._fetching[send.ticket] = _Fetching((shard, bucket), desk.client.sink((shard, bucket)))
            case RangesRequest():
                assert desk is not None
                self._ranges[send.ticket] = desk.ranges()

    def _send_tables(self, send: Send, request: AboutTables) -> None:
        """Push a bucket, as its gradients are when it leaves, or pull one; or have a shard followed, or move."""
        desk = self.desk
        assert desk is not None
        if isinstance(request, CopyRequest):
            self._copies[send.ticket] = desk.room_for_copy(request.shard)

        def post() -> None:
            comm = self.comm
            told: AboutTables = request
            sink: Fitting | None = None
            source = None
            if comm is None or send.ticket in self._cancelled:
                self._replied(send.ticket, CancelledError("its request was not sent yet"))
                return
            ended = False

            def done(result: Reply | GossipxError) -> None:
                nonlocal ended
                ended = True
                self._cancels.pop(send.ticket, None)
                self._replied(send.ticket, result)

            try:
                if isinstance(told, RangesRequest):
                    sink = self._ranges.get(send.ticket, Nothing())
                elif isinstance(told, GradientRequest):
                    if told.epoch != desk.client.epoch:
                        raise CancelledError("it is of a layout that is over")
                    place = told.shard, told.bucket
                    try:
                        parts, source = desk.client.encode(place)
                    except Exception as error:
                        self._broken(error)
                        return
                    told = dataclasses.replace(told, parts=parts, settings=desk.client.settings(place))
                elif isinstance(told, RecordRequest):
                    gradient = self._gradients.get(send.ticket)
                    source = Source(memoryview(b"")) if gradient is None else gradient.source
                elif isinstance(told, CopyRequest):
                    sink = self._copies.get(send.ticket, Nothing())
                else:
                    fetching = self._fetching.get(send.ticket)
                    sink = Nothing() if fetching is None else fetching.sink
                    told = desk.client.told(told)
                cancel = comm.request(
                    send.to,
                    told,
                    deadline=send.deadline,
                    payload=sink,
                    done=done,
                    brought=source,
                )
                self._cancels[send.ticket] = cancel
                if ended:  # before there was anything to cancel
                    self._cancels.pop(send.ticket, None)
            except CancelledError as error:
                self._replied(send.ticket, error)
            except Exception as error:  # the role still has to hear of its request
                self._replied(send.ticket, LocalFaultError(f"a request could not be sent: {error}"))

        self.post(post)

    def fetched(self, ticket: int) -> None:
        """The tables that came under ``ticket`` are to be used."""
        fetching = self._fetching.pop(ticket, None)
        if fetching is None:
            return  # done while deciding
        assert self.desk is not None
        try:
            self.desk.client.fetched(fetching.place, fetching.sink)
        except Exception as error:
            self._broken(error)

    def ranges(self, ticket: int) -> Ranges:
        """What came under ``ticket`` of tables that move here, the caller's from now on."""
        return self._ranges.pop(ticket)

    def spoilt(self, error: Exception) -> None:
        """A shard's tables could not be dealt with: another's push is left out, any other error ends training."""
        if isinstance(error, ProtocolError):
            self._note("protocol", f"a push that does not fit is left out: {error}")
        else:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        if isinstance(error, UsageError):  # it says what is wrong, and where
            self._fail(error)
            return
        made = UsageError(f"a part of the parameter server failed: {type(error).__name__}: {error}")
        made.__cause__ = error
        self._fail(made)

    def share(self, ticket: int, other: int) -> None:
        """The gradient that was kept under ``ticket`` is kept under ``other``, too."""
        self._gradients[other] = self._gradients[ticket].hold()

    def held_gradient(self, ticket: int) -> Gradient:
        """The gradient that was kept under ``ticket``, for the caller to release, too."""
        return self._gradients[ticket].hold()

    def copy(self, ticket: int) -> Copy:
        """The copy of a shard that came under ``ticket``, the caller's from now on."""
        return self._copies.pop(ticket)

    def gradient(self, ticket: int) -> Gradient:
        """The gradient that was kept under ``ticket``, the caller's from now on."""
        return self._gradients.pop(ticket)

    def give_up(self, ticket: int) -> None:
        """The answer under ``ticket`` is of no interest any more; :meth:`cancel` follows."""
        self._cancelled.add(ticket)

    def cancel(self, ticket: int) -> None:
        """Have the request under ``ticket`` end."""
        self.post(functools.partial(self._cancel, ticket))

    def _cancel(self, ticket: int) -> None:
        transfer = self._transfers.get(ticket)
        cancel = self._cancels.get(ticket) if transfer is None else transfer.cancel
        if cancel is not None:
            cancel()

    def post(self, what: Callable[[], None]) -> None:
        """Have something done, in order, by a thread of its own."""
        self._outbox.put(what)

    def close(self) -> None:
        """Send nothing any more, and tell nobody."""
        self._outbox.close()
        self._tell = self._note = self._fail = _nobody  # who was told holds us

    # --- what came of it --------------------------------------------------------------------------

    def _replied(self, ticket: int, result: Reply | GossipxError) -> None:
        fetching = self._fetching.get(ticket)
        if isinstance(result, TablesReply) and fetching is not None:
            try:
                fetching.sink.read()
            except ProtocolError as error:
                self._note("protocol", f"tables cannot be decoded, and are asked for again: {error}")
                self._tell(Failed(ticket, Fault.PROTOCOL))
                return
        if isinstance(result, ModelReply):
            transfer = self._transfers[ticket]
            transfer.seconds = time.monotonic() - transfer.began
            transfer.their_step = result.step
            transfer.weight = result.weight
            if transfer.taking is not None:
                try:
                    transfer.taking.decode()
                except ProtocolError as error:
                    self._note("protocol", f"a model cannot be decoded: {error}")
                    self._tell(Failed(ticket, Fault.PROTOCOL))
                    return
            if isinstance(transfer.request, PullRequest | TakeRequest | ElasticRequest):
                transfer.distance = transfer.incoming.norm()
            if math.isnan(transfer.distance) and isinstance(transfer.request, TakeRequest | ElasticRequest):
                self._tell(Failed(ticket, Fault.POISONED))  # of a take, before the other side counts on it
                return
        match result:
            case UsageError():
                self._fail(result)
            case NotAuthorisedError() | RefusedError() if self.comm is not None and self.comm.trust.is_outcast:
                self._fail(result)
            case PeerUnreachableError():
                self._tell(Failed(ticket, Fault.UNREACHABLE))
            case PeerTimeoutError():
                self._tell(Failed(ticket, Fault.TIMEOUT))
            case LocalFaultError():
                self._note("local", str(result))
                self._tell(Failed(ticket, Fault.LOCAL))
            case CancelledError():
                self._tell(Failed(ticket, Fault.CANCELLED))
            case GossipxError():
                self._note("protocol", str(result))
                self._tell(Failed(ticket, Fault.PROTOCOL))
            case _:
                self._tell(Replied(ticket, result))

    def keep(self, ticket: int, brought: Transfer | Gradient) -> None:
        """What another has brought is under ``ticket`` from now on."""
        if isinstance(brought, Gradient):
            self._gradients[ticket] = brought
        else:
            self._transfers[ticket] = brought

    def pop(self, ticket: int) -> Transfer:
        """The model under ``ticket``, the caller's from now on."""
        return self._transfers.pop(ticket)

    def forget(self, ticket: int) -> None:
        """What is under ``ticket`` is no longer needed."""
        self._cancelled.discard(ticket)
        self._fetching.pop(ticket, None)
        self._copies.pop(ticket, None)
        self._ranges.pop(ticket, None)
        transfer = self._transfers.pop(ticket, None)
        if transfer is not None:
            transfer.incoming.release()
        gradient = self._gradients.pop(ticket, None)
        if gradient is not None:
            gradient.release()


def _nobody(*told: object) -> None:
    """Whom those tell who are closed."""
