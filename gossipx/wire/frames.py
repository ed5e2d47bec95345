"""Frames, the encoding of messages on a connection: bytes in, messages out; no socket, no clock.

A frame, all numbers big-endian::

    offset  bytes
         0      4  magic, "GSPX"            the first two fields never move, so that
         4      2  protocol version         another version can be recognized
         6      2  kind of message; the highest bit: the payload travels out of band
         8      8  request id, chosen by the requester, repeated in the reply
        16      4  M, length of the metadata
        20      8  P, length of the payload
        28      C  check of bytes 0..27 and the metadata
      28+C      M  metadata: one JSON object, UTF-8, the message's fields
    28+C+M      P  payload: raw bytes
  28+C+M+P      C  check of the payload; left out if P is 0

A check is the XXH3-64 of its part (C = 8), which detects accidents but does not protect from an attacker. If the run
has a secret, it is a MAC after the handshake (C = 32, :mod:`gossipx.wire.auth`). Over TLS there is no check (C = 0),
because TLS authenticates each of its records.

An out-of-band payload takes another path, and its frame ends with the metadata: the receiver reads the payload from
shared memory (:mod:`gossipx.transports.shared_memory`), or a carrier such as gloo transfers it; the sender then
confirms it by a Carried message with the payload's digest.

Nothing is unpickled or evaluated. Every length is checked against the bound declared for its kind of message before
anything is allocated, and a payload is received directly into the buffer that the receiver provides.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec
import xxhash

from gossipx.errors import CorruptedError, ProtocolError, printable
from gossipx.memory import PIECE, ByteObserver, Source
from gossipx.protocol.fields import MAX_METADATA, Kind, all_kinds, kind_of
from gossipx.wire import Expect, Message, Sink

MAGIC = b"GSPX"
VERSION = 9
# The bit of the kind that marks an out-of-band payload.
_OUT_OF_BAND = 0x8000

Buffers = list[bytes | memoryview]
Part: TypeAlias = tuple[Buffers, ByteObserver | None]
"""Buffers to send in one call, and a function that must see their bytes as they are sent, before the next part."""

KINDS = {kind.number: kind for kind in all_kinds()}
"""Kinds by the number in a frame's header, as the messages declare them (:mod:`gossipx.protocol.fields`)."""
_SHOWN = 200  # characters of a refusal: it may quote what the other peer has sent

_START = struct.Struct("!4sH")
_HEADER = struct.Struct("!4sHHQIQ")
HEADER_BYTES = _HEADER.size
"""Length of the header without its check, which follows."""


class Check(Protocol):
    """The running checksum of one part of a frame; the objects of :mod:`hashlib`, :mod:`hmac` and :mod:`xxhash` fit."""

    @property
    def digest_size(self) -> int:
        """Bytes of the digest; the same for all checks in one direction of a connection."""

    def update(self, piece: bytes | memoryview, /) -> None:
        """Add the next piece."""

    def digest(self) -> bytes:
        """Return the digest of the part."""


Checks = Callable[[], Check]
"""Creates the checks of all parts of all frames in order: two for a frame with a payload, one for a frame without.

If a carrier transfers the payload, the link checks it, without TLS by the second one (:meth:`Decoder.next_check`).
"""
CHECKSUMS: Checks = xxhash.xxh3_64


class Unchecked:
    """A :class:`Check` without a checksum, for connections whose transport already checks all bytes."""

    digest_size = 0

    def update(self, piece: bytes | memoryview, /) -> None:
        """Do nothing."""

    def digest(self) -> bytes:
        """Return no bytes."""
        return b""


class VersionError(ProtocolError):
    """The other side uses another version of the protocol."""


# --- metadata -----------------------------------------------------------------------------------


def metadata_of(message: Message) -> bytes:
    """Return the metadata of ``message``.

    NaN and infinite figures of a report become null, as JSON cannot represent them; null reads as "no figure".

    Raises:
        ValueError: a peer would not accept one of the fields.
    """
    try:
        metadata = encoded(message)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{type(message).__name__}: {error}") from error
    _decoded(kind_of(type(message)), metadata)
    return metadata


def _plain_number(value: Any) -> Any:
    """Return a number of numpy, or of another subclass of int or float, as a plain one."""
    return float(value) if isinstance(value, float) else value.__index__()


encoded = msgspec.json.Encoder(enc_hook=_plain_number).encode
"""Returns a struct as JSON."""


def message_of(kind: Kind, metadata: bytes) -> Message:
    """Return the message that the metadata of a frame encodes.

    Raises:
        ProtocolError: the metadata is not a message of this kind, or a field is not allowed.
    """
    try:
        message: Message = _decoded(kind, metadata)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{kind.message.__name__} refused: {printable(str(error), _SHOWN)}") from None
    return message


def _decoded(kind: Kind, metadata: bytes) -> Any:
    message = kind.decode(metadata)
    for name, check in kind.checks:
        try:
            check(getattr(message, name))
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return message


# --- encoding -----------------------------------------------------------------------------------


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
        checks: of the connection and direction. MACs are numbered, so send this frame before the next is encoded.
        out_of_band: whether the payload is left out of the frame and sent in another way.

    Raises:
        ValueError: a peer would not accept the message; raised by this call, not during iteration.
    """
    kind = kind_of(type(message))
    metadata = metadata_of(message)
    size = 0 if payload is None else payload.view.nbytes
    if len(metadata) > kind.metadata or size > kind.payload:
        raise ValueError(
            f"{kind.message.__name__} with {len(metadata)} bytes of metadata and {size} of payload:"
            f" at most {kind.metadata} and {kind.payload} are allowed"
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
    # The last piece is sent together with the digest, so a small model takes a single call.
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


# --- decoding -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One whole frame, checked.

    Attributes:
        payload: the sink that ``expect`` returned; None: no payload.
        out_of_band: whether the payload is still to be received in another way.
    """

    request: int
    message: Message
    payload: Sink | None
    out_of_band: bool = False


class Decoder:
    """Decodes frames. Write received bytes into :meth:`next_buffer`, then call :meth:`received` with their number.

    Args:
        expect: called with a message and its request's number when a payload follows; returns the sink for the payload.
            May be replaced between two frames.
        max_metadata: maximum bytes of metadata; SMALL_METADATA while the other side is not authenticated.

    Attributes:
        in_payload: whether the next bytes belong to a payload.
    """

    def __init__(self, expect: Expect, max_metadata: int = MAX_METADATA):
        self.max_metadata = max_metadata
        self.expect = expect
        self._broken: ProtocolError | None = None
        self._frame: Frame
        self._sink: Sink
        self._start = 0  # offset of the current piece in the payload
        self._seen = 0  # bytes of it that were added to the check
        self.in_payload = False
        self.use(CHECKSUMS)

    def use(self, checks: Checks) -> None:
        """Use ``checks`` from the next frame on; call between two frames only."""
        self._checks, self._check = checks, checks()
        self._header = bytearray(HEADER_BYTES + self._check.digest_size)
        self._await(memoryview(self._header), Decoder._header_whole)

    def next_check(self) -> Check:
        """Return the check of the next part, which is received out of band; call between two frames only."""
        check, self._check = self._check, self._checks()
        return check

    @property
    def current_message(self) -> Message:
        """The message whose payload is being received."""
        return self._frame.message

    def next_buffer(self) -> memoryview:
        """Return the buffer for the next bytes, never empty. Raises the ProtocolError of an earlier call, if any."""
        if self._broken is not None:
            raise self._broken
        return self._view[self._filled :]

    def update_check(self, part: memoryview) -> None:
        """Add bytes of a payload to the check ahead of :meth:`received`, right after those added before."""
        self._check.update(part)
        self._seen += len(part)

    def received(self, count: int) -> Frame | None:
        """Process the next ``count`` bytes in :meth:`next_buffer`; return the frame if they complete one.

        Raises:
            ProtocolError: they violate the protocol; the decoder is then unusable.
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
        """Receive into ``view`` next, and call ``whole`` once it is full."""
        # A plain function: a bound method would be a reference cycle, which keeps the last payload until a gc run.
        self._view, self._filled, self._whole = view, 0, whole

    def _check_start(self) -> None:
        """Reject a foreign protocol by its first bytes, since it may never send as many as a header has."""
        start = bytes(self._header[: min(self._filled, len(MAGIC))])
        if not MAGIC.startswith(start):
            raise ProtocolError(f"not a gossipx peer: its first bytes are {start!r}")
        if self._filled >= _START.size:
            version = _START.unpack_from(self._header)[1]
            if version != VERSION:
                raise VersionError(
                    f"the other side uses version {version} of the protocol, this side version"
                    f" {VERSION}: install the same gossipx on both"
                )

    def _header_whole(self) -> None:
        _, _, number, _, metadata, payload = _HEADER.unpack_from(self._header)
        kind = KINDS.get(number & ~_OUT_OF_BAND)
        if kind is None:
            raise ProtocolError(f"a frame of unknown kind {number}")
        if not 2 <= metadata <= min(kind.metadata, self.max_metadata) or payload > kind.payload:
            raise ProtocolError(
                f"{kind.message.__name__} announced {metadata} bytes of metadata and {payload} of"
                f" payload: at most {min(kind.metadata, self.max_metadata)} and {kind.payload} are allowed"
            )
        self._await(memoryview(bytearray(metadata)), Decoder._metadata_whole)

    def _metadata_whole(self) -> Frame | None:
        _, _, number, request, _, payload = _HEADER.unpack_from(self._header)
        check = self._check
        check.update(memoryview(self._header)[:HEADER_BYTES])
        check.update(self._view)
        self._check = self._checks()
        if not hmac.compare_digest(check.digest(), self._header[HEADER_BYTES:]):
            raise CorruptedError("a frame whose header or metadata does not match its checksum")
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
        self._await(sink.buffer_at(0), Decoder._piece_whole)
        return None

    def _piece_whole(self) -> Frame | None:
        self._check.update(self._view[self._seen :])
        self._seen = 0
        self._sink.filled(self._start)
        self._start += len(self._view)
        if self._start < self._sink.nbytes:
            self._await(self._sink.buffer_at(self._start), Decoder._piece_whole)
        else:
            self.in_payload = False
            if not self._check.digest_size:
                return self._trailer_whole()
            self._await(memoryview(bytearray(self._check.digest_size)), Decoder._check_payload)
        return None

    def _check_payload(self) -> Frame:
        """Compare the trailer, which has arrived, with the check of the payload."""
        check, self._check = self._check, self._checks()
        if not hmac.compare_digest(check.digest(), self._view):
            raise CorruptedError("a payload that does not match its checksum")
        return self._trailer_whole()

    def _trailer_whole(self) -> Frame:
        """Return the frame, with or without a trailer, and await the next header."""
        self._await(memoryview(self._header), Decoder._header_whole)
        return self._frame
