"""Frames of the protocol between peers: bytes in, messages out; no socket, no clock.

A frame, all numbers big-endian::

    offset  bytes
         0      4  magic, "GSPX"            the first two fields never move, so that
         4      2  protocol version         another version can be told by name
         6      2  kind of message; the highest bit: the payload lies beside the connection
         8      8  request id, chosen by the requester, repeated in the reply
        16      4  M, length of the metadata
        20      8  P, length of the payload
        28      C  check of bytes 0..27 and the metadata
      28+C      M  metadata: one JSON object, UTF-8, the message's fields
    28+C+M      P  payload: raw bytes
  28+C+M+P      C  check of the payload; left out where P is 0

A check is the XXH3-64 of its part (C = 8). It finds accidents and is no protection from an attacker. Where the run has
a secret, it is a MAC from the handshake on (C = 32, :mod:`gossipx.wire.auth`). Over TLS there is none (C = 0): the tag
of each record finds any change.

A payload that lies beside the connection comes another way (:mod:`gossipx.transports.shared_memory`), and the frame
ends with its metadata. The receiver reads the payload from shared memory, or a carrier brings it and Carried tells its
digest.

Nothing is unpickled or evaluated. Every length is checked against a bound of its kind, as declared with the message,
before anything is allocated, and a payload goes straight into the room that its receiver provides.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import xxhash

from gossipx.errors import ProtocolError
from gossipx.memory import PIECE, ByteObserver, Source
from gossipx.protocol.fields import MAX_METADATA, kind_of
from gossipx.wire import Expect, Message, Sink
from gossipx.wire.kinds import KINDS, message_of, metadata_of

MAGIC = b"GSPX"
VERSION = 4
# The bit of the kind that says that the payload lies beside the connection.
_OUT_OF_BAND = 0x8000

Buffers = list[bytes | memoryview]
Part: TypeAlias = tuple[Buffers, ByteObserver | None]
"""Buffers to send in one call, and a function that must see all of them as they go out, before the next part."""

_START = struct.Struct("!4sH")
_HEADER = struct.Struct("!4sHHQIQ")
HEADER_BYTES = _HEADER.size
"""A check follows, whose length depends on the connection."""


class Check(Protocol):
    """Looks at one part of a frame, piece by piece; as those of :mod:`hashlib`, :mod:`hmac` and :mod:`xxhash` do."""

    @property
    def digest_size(self) -> int:
        """Bytes of the digest; the same for all checks of a connection and direction."""

    def update(self, piece: bytes | memoryview, /) -> None:
        """Look at the next piece."""

    def digest(self) -> bytes:
        """Return the digest of the part."""


Checks = Callable[[], Check]
"""Makes the check of each part of each frame in order: two for a frame with a payload, one for a frame without."""
CHECKSUMS: Checks = xxhash.xxh3_64


class Unchecked:
    """The :class:`Check` of a connection whose transport checks all bytes: looks at nothing."""

    digest_size = 0

    def update(self, piece: bytes | memoryview, /) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Return no bytes."""
        return b""


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol."""


# --- out ----------------------------------------------------------------------------------------


def encode(
    message: Message,
    request: int,
    payload: Source | None = None,
    checks: Checks = CHECKSUMS,
    out_of_band: bool = False,
) -> Iterator[Part]:
    """Return the frame of ``message``, in parts to send in turn; the payload is never copied.

    Args:
        message: of a declared kind.
        request: id of the request, 0 to 2⁶⁴ − 1.
        payload: must not change until its last piece is sent.
        checks: of the connection and direction. MACs count, so this frame must be sent whole before the next is
            encoded.
        beside: whether the payload lies beside the connection, and is no part of the frame.

    Raises:
        ValueError: at once, not when iterated: the message is not one that a peer would accept.
    """
    kind = kind_of(type(message))
    metadata = metadata_of(message)
    size = 0 if payload is None else payload.view.nbytes
    if len(metadata) > kind.metadata or size > kind.payload:
        raise ValueError(
            f"{kind.message.__name__} with {len(metadata)} bytes of metadata and {size} of payload:"
            f" at most {kind.metadata} and {kind.payload} can be sent"
        )
    header = _HEADER.pack(MAGIC, VERSION, kind.number | out_of_band * _OUT_OF_BAND, request, len(metadata), size)
    check = checks()
    check.update(header + metadata)
    head = header + check.digest() + metadata
    return (
        iter([([head], None)]) if payload is None or not size or out_of_band else _with_payload(head, payload, checks)
    )


def _with_payload(head: bytes, payload: Source, checks: Checks) -> Iterator[Part]:
    view = payload.view.cast("B")
    known = payload.checksum if checks is CHECKSUMS else None
    check = checks() if known is None else Unchecked()
    # The last piece goes with the digest, and of a small model all that there is.
    last = (len(view) - 1) // PIECE * PIECE
    if last:
        yield [head], None
        yield [view[:last]], check.update
        head = b""
    check.update(view[last:])
    digest = check.digest() if known is None else known
    if checks is CHECKSUMS:
        payload.checksum = digest
    yield [head, view[last:], digest], None


# --- in -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One whole frame, checked.

    Attributes:
        payload: the sink that ``expect`` gave; None where the frame has none.
        beside: whether the payload has yet to come, from beside the connection.
    """

    request: int
    message: Message
    payload: Sink | None
    out_of_band: bool = False


class Decoder:
    """Makes frames from bytes. Put bytes into :meth:`next_buffer`, tell :meth:`received` how many.

    Args:
        expect: asked before a payload is accepted; may be changed between two frames.

    Attributes:
        in_payload: whether the next bytes are a payload's.
        most: bytes of metadata that may be allocated; SMALL_METADATA as long as the other side is a stranger.
    """

    def __init__(self, expect: Expect, most: int = MAX_METADATA):
        self.most = most
        self.expect = expect
        self._broken: ProtocolError | None = None
        self._frame: Frame
        self._sink: Sink
        self._start = 0  # of the piece that comes in, in the payload
        self._seen = 0  # bytes of it that were checked
        self.in_payload = False
        self.use(CHECKSUMS)

    def use(self, checks: Checks) -> None:
        """Check frames from the next one on by ``checks``; between two frames only."""
        self._checks, self._check = checks, checks()
        self._header = bytearray(HEADER_BYTES + self._check.digest_size)
        self._await(memoryview(self._header), Decoder._header_whole)

    def part(self) -> Check:
        """Return the check of the next part, which comes beside the connection; between two frames only."""
        check, self._check = self._check, self._checks()
        return check

    @property
    def coming(self) -> Message:
        """The message whose payload comes in, as long as one does."""
        return self._frame.message

    def next_buffer(self) -> memoryview:
        """Return where the next bytes belong; never empty. Raises the ProtocolError that came before."""
        if self._broken is not None:
            raise self._broken
        return self._view[self._filled :]

    def look(self, part: memoryview) -> None:
        """Check a part of a payload ahead of :meth:`received`: it lies in :meth:`next_buffer` after the last part."""
        self._check.update(part)
        self._seen += len(part)

    def received(self, count: int) -> Frame | None:
        """Take ``count`` bytes as put into :meth:`next_buffer`; return the frame, if they end one.

        Raises:
            ProtocolError: they are not what the protocol allows; the decoder must not be used again.
        """
        arrived = self.next_buffer()[:count]
        if not 0 < count == len(arrived):
            raise ValueError(f"{count} bytes cannot have been received")
        self._filled += count
        try:
            if self._whole is Decoder._header_whole:
                self._check_start()
            return self._whole(self) if self._filled == len(self._view) else None
        except ProtocolError as error:
            self._broken = error
            raise

    def _await(self, view: memoryview, whole: Callable[[Decoder], Frame | None]) -> None:
        # A function: a bound method would hold this decoder, and with it the last payload, until a gc run.
        self._view, self._filled, self._whole = view, 0, whole

    def _check_start(self) -> None:
        """Refuse strangers by their first bytes; they may never send a header's worth."""
        start = bytes(self._header[: min(self._filled, len(MAGIC))])
        if not MAGIC.startswith(start):
            raise ProtocolError(f"no gossipx peer: it began with {start!r}")
        if self._filled >= _START.size:
            version = _START.unpack_from(self._header)[1]
            if version != VERSION:
                raise VersionError(
                    f"the other side speaks version {version} of the protocol, this side version"
                    f" {VERSION}: install the same gossipx on both"
                )

    def _header_whole(self) -> None:
        _, _, number, _, metadata, payload = _HEADER.unpack_from(self._header)
        kind = KINDS.get(number & ~_OUT_OF_BAND)
        if kind is None:
            raise ProtocolError(f"a frame of unknown kind {number}")
        if not 2 <= metadata <= min(kind.metadata, self.most) or payload > kind.payload:
            raise ProtocolError(
                f"{kind.message.__name__} announced {metadata} bytes of metadata and {payload} of"
                f" payload: at most {min(kind.metadata, self.most)} and {kind.payload} are allowed"
            )
        self._await(memoryview(bytearray(metadata)), Decoder._metadata_whole)

    def _metadata_whole(self) -> Frame | None:
        _, _, number, request, _, payload = _HEADER.unpack_from(self._header)
        check = self._check
        check.update(memoryview(self._header)[:HEADER_BYTES])
        check.update(self._view)
        self._check = self._checks()
        if not hmac.compare_digest(check.digest(), self._header[HEADER_BYTES:]):
            raise ProtocolError("a frame whose header or metadata does not match its checksum")
        message = message_of(KINDS[number & ~_OUT_OF_BAND], bytes(self._view))
        sink = self.expect(message, request)
        size = 0 if sink is None else sink.nbytes
        if payload != size:
            raise ProtocolError(
                f"{type(message).__name__} with a payload of {payload} bytes where {size} were expected"
            )
        out_of_band = bool(number & _OUT_OF_BAND)
        self._frame = Frame(request, message, sink, out_of_band and size > 0)
        if sink is None or not size or out_of_band:
            return self._trailer_whole()
        self._sink, self._start, self.in_payload = sink, 0, True
        self._await(sink.room(0), Decoder._piece_whole)
        return None

    def _piece_whole(self) -> Frame | None:
        self._check.update(self._view[self._seen :])
        self._seen = 0
        self._sink.filled(self._start)
        self._start += len(self._view)
        if self._start < self._sink.nbytes:
            self._await(self._sink.room(self._start), Decoder._piece_whole)
        else:
            self.in_payload = False
            if not self._check.digest_size:
                return self._trailer_whole()
            self._await(memoryview(bytearray(self._check.digest_size)), Decoder._check_payload)
        return None

    def _check_payload(self) -> Frame:
        check, self._check = self._check, self._checks()
        if not hmac.compare_digest(check.digest(), self._view):
            raise ProtocolError("a payload that does not match its checksum")
        return self._trailer_whole()

    def _trailer_whole(self) -> Frame:
        self._await(memoryview(self._header), Decoder._header_whole)
        return self._frame
