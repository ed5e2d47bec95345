"""The driver's side of waves: it encodes codes, averages those of a shard, and takes means into the reference.

All of that happens in the outbox's thread, one after the other: training and the threads that receive do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor

from gossipx.compression import WaveCodec
from gossipx.errors import CancelledError, GossipxError, LocalFaultError, ProtocolError
from gossipx.memory import Source
from gossipx.model.pool import HostBuffer, Snapshot
from gossipx.protocol import effects, events, messages
from gossipx.protocol.server_messages import CarryingReply
from gossipx.runtime.driver.captures import Captures, Retrieval
from gossipx.runtime.driver.clock import DriverClock
from gossipx.runtime.driver.outbox import Outbox, PreparedRequest, nothing
from gossipx.wire import Bytes, Sink


class Upload(Bytes):
    """The code of another peer, as it arrives with its request."""

    def release(self) -> None:
        """Do nothing: the memory is this object's."""


class _Reply:
    """The receive buffer of a mean or a reference; a :class:`gossipx.wire.SinkFactory`.

    Attributes:
        sender: the peer that replies.
        reply, content: what has arrived.
    """

    nbytes = 1  # not 0: there is a payload, but its size is only known with the reply

    def __init__(self, sender: int, size_of: Callable[[CarryingReply], int]):
        self.sender = sender
        self._size_of = size_of
        self.reply: CarryingReply | None = None
        self.content = memoryview(b"")

    def fit(self, reply: CarryingReply) -> Sink:
        """Return the sink of the reply's payload. Raises ProtocolError if it does not fit this run's model."""
        self.reply, self.content = reply, memoryview(bytearray(self._size_of(reply)))
        return Bytes(self.content)


@dataclass
class _Begun:
    """A wave, or the repair of a reference, of this peer: its codec, and when it began."""

    codec: WaveCodec
    at: float


class WaveWork:
    """Carries out what a role decides about waves.

    Args:
        codecs: one per fragment that is exchanged; none: the run has no waves.
        captures: this peer's captured models.
        outbox: sends its requests.
        clock: measures waves.
        handle: passes an event to the role.
        reply: sends an answer with a payload.
    """

    def __init__(
        self,
        rank: int,
        captures: Captures,
        outbox: Outbox,
        clock: DriverClock,
        handle: Callable[[events.Event], None],
        reply: Callable[[effects.Answer, messages.Reply, Source | None], None],
    ):
        self.codecs: dict[int, WaveCodec] = {}
        self._rank, self._captures, self._outbox, self._clock = rank, captures, outbox, clock
        self._handle, self._reply = handle, reply
        self._begun: dict[int, _Begun] = {}  # by ticket
        self._uploads: dict[Hashable, tuple[messages.ShardRequest, Upload]] = {}  # by the request's key
        self._asked: dict[Hashable, tuple[int, messages.ReferenceRequest]] = {}  # by the request's key
        self._codes: dict[int, tuple[messages.ShardRequest, Upload]] = {}  # those that are kept, by ticket
        self._replies: dict[int, _Reply] = {}  # by ticket

    def begin(self, model: Sequence[Tensor] | None) -> None:
        """Set the reference of each fragment, see :meth:`WaveCodec.begin`."""
        for codec in self.codecs.values():
            codec.begin(None if model is None else codec.fragment.vectors_of(model))

    def entered(self, ticket: int, fragment: int) -> None:
        """Record that a model was captured, with which a wave may begin."""
        if fragment in self.codecs:
            self._begun[ticket] = _Begun(self.codecs[fragment], self._clock.now())

    # --- computations -----------------------------------------------------------------------------

    def encode(self, effect: effects.EncodeWave) -> None:
        """Encode our codes; WaveEncoded follows."""

        def work(codec: WaveCodec, own: Snapshot) -> events.Event:
            model = own.buffer.vectors
            reference = codec.encode(effect.ticket, effect.number, effect.members, model, effect.founds)
            return events.WaveEncoded(effect.ticket, reference)

        self._work(effect.ticket, work)

    def average(self, effect: effects.AverageShard) -> None:
        """Average the codes of our shard; ShardAveraged follows."""
        kept = {rank: self._codes.pop(ticket) for rank, ticket in effect.codes}

        def work(codec: WaveCodec, own: Snapshot) -> events.Event:
            codes = {rank: (request.sizes, upload.view) for rank, (request, upload) in kept.items()}
            return events.ShardAveraged(effect.ticket, codec.average(effect.ticket, codes))

        self._work(effect.ticket, work)

    def end(self, effect: effects.EndWave) -> None:
        """Take means, or a later reference, into the reference and the captured model; WaveEnded follows."""
        replies = {owner: self._replies.pop(ticket) for owner, ticket in effect.shares}
        whole = None if effect.reference is None else self._replies.pop(effect.reference)

        def update(codec: WaveCodec, model: Sequence[Tensor], out: HostBuffer) -> tuple[int, ...]:
            if whole is not None and isinstance(whole.reply, messages.ReferenceReply):
                taken = codec.take(whole.reply, whole.content, model, out)
                return () if taken else (whole.sender,)
            shares = {
                owner: (one.reply, one.content)
                for owner, one in replies.items()
                if isinstance(one.reply, messages.ShareReply)
            }
            return codec.end(effect.ticket, shares, effect.with_own, model, out) or ()

        def work(codec: WaveCodec, own: Snapshot) -> events.Event:
            out = codec.fragment.pool.buffer()
            poisoned = update(codec, own.buffer.vectors, out)
            retrieval = Retrieval(self._clock.now() - self._begun[effect.ticket].at, 0, None, None)
            self._captures.replace(effect.ticket, out, retrieval)
            return events.WaveEnded(effect.ticket, poisoned)

        self._work(effect.ticket, work)

    def _work(self, ticket: int, work: Callable[[WaveCodec, Snapshot], events.Event]) -> None:
        """Run ``work`` on a captured model in the outbox's thread, and report its event; do nothing if it is gone."""

        def job() -> None:
            begun, own = self._begun.get(ticket), self._captures.hold(ticket)
            if begun is None or own is None:
                return
            try:
                event = work(begun.codec, own)
            except Exception as error:  # the role waits for the outcome
                self._outbox.fail(error if isinstance(error, GossipxError) else LocalFaultError(f"a wave: {error}"))
                return
            finally:
                own.release()
            self._handle(event)

        own = self._captures.hold(ticket)
        if own is not None:  # the copy may be complete only at the next step boundary
            own.when_settled(lambda: self._outbox.post(job))
            own.release()

    # --- requests ---------------------------------------------------------------------------------

    def send(self, send: effects.Send, request: messages.WaveRequest) -> None:
        """Send a request of a wave."""
        codec = self.codecs[request.fragment]
        sink = self._replies[send.ticket] = _Reply(send.to, lambda reply: self._size_of(reply, request, codec, send.to))

        def prepare() -> PreparedRequest:
            if isinstance(request, messages.ReferenceRequest):
                return codec.asked(), sink, None
            if isinstance(request, messages.ShareRequest):
                return request, sink, None
            code = codec.code(request.wave, request.members, send.to)
            if code is None:
                raise CancelledError("the wave was given up before its code was sent")
            sizes, content = code
            return msgspec.structs.replace(request, sizes=tuple(sizes)), sink, Source(content)

        self._outbox.send(send, prepare, lambda reply: None)

    def _size_of(self, reply: CarryingReply, request: messages.WaveRequest, codec: WaveCodec, owner: int) -> int:
        match reply, request:
            case messages.ReferenceReply(), messages.ReferenceRequest():
                return codec.reference_bytes
            case messages.ShareReply(_, sizes), messages.ShardRequest():
                return codec.fit(request.members, owner, sizes)
            case messages.ShareReply(_, sizes), messages.ShareRequest():
                return codec.fit(request.members, request.owner, sizes)
        raise ProtocolError("it replied to a request of a wave with something else")

    def sink_for(self, sender: int, request: messages.ShardRequest) -> Upload:
        """Return the sink for another peer's code. Raises ProtocolError if it does not fit this run's model."""
        codec, members = self.codecs.get(request.fragment), request.members
        if codec is None or not {sender, self._rank} <= set(members):
            raise ProtocolError("it sent a code of a wave that this peer takes no part in")
        return Upload(memoryview(bytearray(codec.fit(members, self._rank, request.sizes))))

    def store(self, key: Hashable, sender: int, request: messages.Request, upload: object) -> None:
        """Store what belongs to the request ``key`` of another peer: a code, or what it asks for."""
        if isinstance(request, messages.ShardRequest) and isinstance(upload, Upload):
            self._uploads[key] = request, upload
        elif isinstance(request, messages.ReferenceRequest):
            self._asked[key] = sender, request

    def keep(self, key: Hashable, ticket: int) -> bool:
        """Move the code of the request ``key`` to ``ticket``; return whether there is one."""
        if key not in self._uploads:
            return False
        self._codes[ticket] = self._uploads.pop(key)
        return True

    def drop(self, key: Hashable) -> None:
        """Release what belongs to the request ``key``, unless it was kept."""
        self._uploads.pop(key, None)
        self._asked.pop(key, None)

    def answer(self, answer: effects.Answer, fragment: int) -> None:
        """Answer with the mean of a shard or with a reference, of this fragment; refuse if it is gone."""
        codec = self.codecs[fragment]
        if answer.share is not None:
            found: tuple[messages.Reply, Source] | None = codec.share(*answer.share)
        else:
            found = codec.give(*self._asked[answer.key])
        if found is None:
            self._reply(answer, messages.NotReadyReply("it has no such mean, or no reference"), None)
        else:
            self._reply(answer, *found)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Break the reference cycles with the driver."""
        self._handle = self._reply = nothing

    def applied(self, ticket: int) -> None:
        """Record that the result of a wave is in the weights."""
        if ticket in self._begun:
            self._begun[ticket].codec.applied(ticket)

    def forget(self, ticket: int) -> None:
        """Release what is kept under a ticket."""
        self._codes.pop(ticket, None)
        self._replies.pop(ticket, None)
        if (begun := self._begun.pop(ticket, None)) is not None:
            begun.codec.forget(ticket)
