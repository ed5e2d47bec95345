"""The TLS transport: streams of another transport, encrypted by mutual TLS 1.3 with a certificate on both sides.

OpenSSL reads and writes memory buffers; the stream below sends and receives their bytes. So deadlines and aborts work
as in that stream. OpenSSL's state of a connection is not thread-safe. A lock is held while OpenSSL computes, but never
while a thread waits for bytes, so one thread may send while another receives.

The connecting side checks the whole certificate in the handshake: it must be for the requested host (a DNS name or IP
address among its subject alternative names), signed by the given CA, and valid at this time. The accepting side does
not know yet which peer connects, so it checks all but the host; :meth:`TlsStream.speaks_for` checks the host later. It
makes its handshake on its first receive or send, so the thread that accepts connections never waits for a remote side
that is not authenticated yet.

Files that are replaced during a run are read again for the next connection. If they cannot be used, such as a new
certificate whose key has not been copied yet, what was read before stays in use. The time in which certificates are
valid is read from their files, since the module ssl shows the dates only of certificates that it has verified, which an
expired one never is; :class:`Reminder` warns before it ends.

The server sends no session tickets. A client that writes and closes would leave them unread, and closing a TCP
connection with unread bytes may discard what was written, without an error from TLS. Callers that must know that their
bytes have arrived ask for an acknowledgement.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gossipx import errors
from gossipx.figures import Counters
from gossipx.memory import ByteObserver
from gossipx.transports import Address, Listener, Stream, Transport, tcp

log = logging.getLogger("gossipx")


class WatchedFiles:
    """Tells whether files have changed, at the cost of one system call per file.

    Args:
        files: read by the caller after this object was made, so that no change is missed.
    """

    def __init__(self, *files: Path):
        self._files = files
        self._seen = self._look()

    def have_changed(self) -> bool:
        """Return whether a file was written, replaced or removed since the last call."""
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, ...] | None]:
        return [_state(file) for file in self._files]


def _state(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


WARN_AT = (14 * 86400.0, 7 * 86400.0, 86400.0, 3600.0, 0.0)
"""Seconds before the end at which the user is warned: in time to issue a new certificate, then as a reminder."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_CONTEXT, _UTC_TIME = 0xA0, 0x17  # tags of DER: the optional version, and a time with a year of two digits


@dataclass(frozen=True)
class Validity:
    """When a certificate is valid.

    Attributes:
        begins, ends: seconds since 1970.
        file: the file with the certificate.
    """

    begins: float
    ends: float
    file: Path

    def fault(self) -> str:
        """Return what is wrong with it by this machine's clock; empty: it is valid."""
        now = time.time()
        return "has expired" if now > self.ends else "is not valid yet" if now < self.begins else ""


def validities_in(file: Path) -> list[Validity]:
    """Return the validity of each certificate in a PEM file that OpenSSL accepts."""
    blocks = _PEM.findall(file.read_bytes())
    return [Validity(*_dates(ssl.PEM_cert_to_DER_cert(block.decode("ascii"))), file) for block in blocks]


class Reminder:
    """Warns before the first of some certificates expires; thread-safe.

    Args:
        certificates: their validity.
        counts: get the number of warnings.
    """

    def __init__(self, certificates: Sequence[Validity], counts: Counters):
        self._counts = counts
        self._lock = threading.Lock()
        self.renew(certificates)

    def renew(self, certificates: Sequence[Validity]) -> None:
        """Warn of these certificates from now on."""
        with self._lock:
            self._certificates = certificates
            self._first = min(certificates, key=lambda one: one.ends, default=None)
            # Of a certificate that has expired already the other side tells in the handshake.
            self._due = math.inf if self.fault() else self._next_after(0.0)

    def fault(self) -> str:
        """Return what is wrong with the dates of the certificates by this machine's clock; empty: nothing."""
        return next(filter(None, (one.fault() for one in self._certificates)), "")

    def remind(self) -> None:
        """Log a warning if one is due, at most one for each entry of :data:`WARN_AT`."""
        now = time.time()
        if now < self._due:
            return
        with self._lock:
            if now < self._due:
                return
            self._due = self._next_after(now)
            self._counts.add("expiry_warnings")
            first = self._first
        assert first is not None
        ends = datetime.datetime.fromtimestamp(first.ends, datetime.timezone.utc)
        what = "has expired" if now >= first.ends else f"expires in {_span(first.ends - now)}"
        message = (
            "%s: the certificate %s (%s UTC), and new connections then fail: replace the file and its key by new ones,"
            " which running peers read"
        )
        log.warning(message, first.file, what, f"{ends:%Y-%m-%d %H:%M}")

    def _next_after(self, now: float) -> float:
        """Return the time of the first warning that is due after ``now``; infinite: no warning is left."""
        due = [] if self._first is None else [self._first.ends - before for before in WARN_AT]
        return min((at for at in due if at > now), default=math.inf)


def _span(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _dates(der: bytes) -> tuple[float, float]:
    """Return the dates notBefore and notAfter of a certificate (RFC 5280, section 4.1)."""
    signed = _elements(_elements(_elements(der)[0][1])[0][1])
    version = int(signed[0][0] == _CONTEXT)
    begins, ends = (_der_time(*one) for one in _elements(signed[version + 3][1]))  # after serial, algorithm and issuer
    return begins, ends


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return the tag and the content of each element."""
    found, at = [], 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 128:
            wide = size & 127
            size = int.from_bytes(der[at : at + wide], "big")
            at += wide
        found.append((tag, der[at : at + size]))
        at += size
    return found


def _der_time(tag: int, content: bytes) -> float:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    found = datetime.datetime.strptime(content.decode("ascii"), form)
    return found.replace(tzinfo=datetime.timezone.utc).timestamp()


# Bytes of plain text encrypted per send: enough to make the system call cheap in comparison.
_PIECE = 256 * 1024
# Bytes per receive: one TLS record or, in a long transfer, a large buffer. A large buffer is borrowed from a pool, so
# that neither idle connections nor those without authentication occupy one.
_RECORD = 16 * 1024
_LARGE = 256 * 1024
# Most seconds to wait until the remote side has read the alert and closed, after this side refused its certificate.
_REFUSAL = 5.0

# Faults of the other side's certificate, by OpenSSL's numbers X509_V_ERR_*.
_UNKNOWN_CA = {2, 7, 18, 19, 20, 21}
_CERTIFICATE_FAULTS = {
    9: "is not valid yet: check the clocks of both machines",
    10: "has expired",
    26: "is not for this use: it needs both serverAuth and clientAuth",
    62: "is not for '{host}', the host in the hosts file",
    64: "is not for '{host}', the host in the hosts file",
}
# Alerts that the other side sends about our certificate, by OpenSSL's names; the subject is the other side.
_ALERTS = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "says that the certificate of this peer has expired",
    "TLSV1_ALERT_UNKNOWN_CA": "does not know the CA that signed the certificate of this peer",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "asks for a certificate, and this peer gave none",
    "SSLV3_ALERT_BAD_CERTIFICATE": "refuses the certificate of this peer: is it for its host in the hosts file?",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "refuses the certificate of this peer: it needs serverAuth and clientAuth",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "refuses the certificate of this peer",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "says that the certificate of this peer is revoked",
    "TLSV1_ALERT_DECRYPT_ERROR": "refuses the certificate of this peer",
    "TLSV1_ALERT_ACCESS_DENIED": "refuses the certificate of this peer",
}
# The alerts that may be about dates; OpenSSL has none for a certificate that is not valid yet.
_ABOUT_DATES = ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_BAD_CERTIFICATE")
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


class TlsStream:
    """An encrypted stream over another transport; also a :class:`gossipx.transports.Certified`.

    Args:
        below: carries the encrypted bytes.
        tls: a connection before its handshake; reads from ``incoming``, writes to ``outgoing``.
        host: the host for which the other side's certificate must be, for error messages; None: not known yet.
        spare: pool of large buffers that are not in use, shared by all streams of a transport.
        dates: of this side's certificates.
    """

    def __init__(
        self,
        below: Stream,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        host: str | None,
        spare: list[memoryview],
        dates: Reminder,
    ):
        self._below = below
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing
        self._host, self._dates = host, dates
        self._state = threading.Lock()  # guards OpenSSL's state
        self._handshake_lock = threading.Lock()
        self._is_up = False
        self._record = memoryview(bytearray(_RECORD))
        self._is_long_transfer = False  # the last receive filled its buffer
        self._spare = spare
        self._failure: errors.GossipxError | None = None

    @property
    def remote(self) -> str:
        """The remote address."""
        return self._below.remote

    @property
    def here(self) -> str:
        """The local address."""
        return self._below.here

    def speaks_for(self, host: str) -> bool:
        """Return whether the other side's certificate is for ``host``: lists exactly this name or address."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        return any(_same_host(name, host) for _, name in certificate.get("subjectAltName", ()))

    def send(self, buffers: Sequence[bytes | memoryview], deadline: float, observe: ByteObserver | None = None) -> None:
        """Encrypt and send all bytes; see :class:`gossipx.transports.Stream`."""
        self.shake_hands(deadline)
        self._dates.remind()
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            while view:
                count = self._encrypt(view[:_PIECE])
                if observe is not None:
                    observe(view[:count])
                view = view[count:]
                if self._outgoing.pending >= _PIECE:
                    self._flush(deadline)
        self._flush(deadline)

    def receive_into(self, view: memoryview, deadline: float, observe: ByteObserver | None = None) -> int:
        """Receive and decrypt; see :class:`gossipx.transports.Stream`."""
        self.shake_hands(deadline)
        count = 0
        while True:
            new = self._decrypt(view[count:])
            if observe is not None:
                observe(view[count : count + new])
            count += new
            if count == len(view) or (count and observe is None):
                return count
            self._fill(deadline)

    def tune(self) -> None:
        """Adapt the stream below to a long transfer; see :class:`gossipx.transports.Stream`."""
        self._below.tune()

    def quiet(self) -> bool:
        """Return whether the remote side has neither closed nor sent unread bytes; never blocks."""
        with self._state:
            waiting = self._tls.pending() or self._incoming.pending
        return not waiting and self._below.quiet()

    def hung_up(self) -> bool:
        """Return whether the remote side has closed."""
        return self._below.hung_up()

    def abort(self) -> None:
        """Close both directions at once."""
        self._below.abort()

    def shake_hands(self, deadline: float) -> None:
        """Make the TLS handshake, unless that is done; :meth:`send` and :meth:`receive_into` do this first.

        Raises:
            StrangerError: the other side's certificate is missing, has expired, or is for another host or use.
            NotAuthorisedError: the other side refuses ours, or the CAs differ. The connecting side may learn this only
                on its first receive.
            ProtocolError: the other side does not speak TLS 1.3.
            PeerTimeoutError, PeerUnreachableError: as :meth:`receive_into`.
        """
        if self._is_up:
            return
        if not self._handshake_lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise errors.PeerTimeoutError(f"{self.remote} did not shake hands within the deadline")
        try:
            while not self._is_up:
                self._is_up = self._step()
                self._flush(deadline)
                if not self._is_up:
                    self._fill(deadline)
        except errors.PeerUnreachableError as error:
            raise type(error)(f"{error}, in the TLS handshake") from error
        except (errors.NotAuthorisedError, errors.StrangerError, errors.ProtocolError):
            self._send_alert(deadline)
            raise
        finally:
            self._handshake_lock.release()

    def _step(self) -> bool:
        """Advance the handshake with the bytes that have arrived; return whether it is complete."""
        with self._state:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                return False
            except ssl.SSLError as error:
                raise self._fault(error) from error
            return True

    def _encrypt(self, view: memoryview) -> int:
        """Encrypt bytes into the outgoing memory buffer; return the number of bytes taken from ``view``."""
        with self._state:
            try:
                return self._tls.write(view)
            except ssl.SSLError as error:
                raise self._fault(error) from error

    def _decrypt(self, view: memoryview) -> int:
        """Decrypt received bytes into ``view`` as far as TLS records are complete.

        Returns:
            The number of decrypted bytes; 0 if more must arrive first.
        """
        count = 0
        with self._state:
            if self._failure is not None:
                raise self._failure
            try:
                while count < len(view):
                    # With a buffer argument, read() returns a byte count.
                    count += cast(int, self._tls.read(len(view) - count, cast(bytearray, view[count:])))
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._failure = self._fault(error)
                if not count:
                    raise self._failure from error
        return count

    def _fill(self, deadline: float) -> None:
        """Receive encrypted bytes and hand them to OpenSSL. After a full record, the next call uses a large buffer."""
        with self._buffer() as buffer:
            count = self._below.receive_into(buffer, deadline)
            with self._state:
                self._incoming.write(buffer[:count])
        self._is_long_transfer = self._is_up and count >= _RECORD

    @contextlib.contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        """Return a context that yields the buffer for one receive: in a long transfer, a large one from the pool."""
        if not self._is_long_transfer:
            yield self._record
            return
        try:
            large = self._spare.pop()
        except IndexError:
            large = memoryview(bytearray(_LARGE))
        try:
            yield large
        finally:
            self._spare.append(large)

    def _flush(self, deadline: float) -> bool:
        """Send the encrypted bytes that OpenSSL has produced; return whether there were any."""
        with self._state:
            data = self._outgoing.read()
        if data:
            self._below.send([data], deadline)
        return bool(data)

    def _send_alert(self, deadline: float) -> None:
        """Send OpenSSL's alert, if this side refuses the other.

        Then read until the other side closes: closing with unread bytes may make TCP discard the alert.
        """
        until = min(deadline, time.monotonic() + _REFUSAL)
        with contextlib.suppress(errors.PeerFaultError):
            if self._flush(until):
                while self._below.receive_into(self._record, until):
                    pass

    def _fault(self, error: ssl.SSLError) -> errors.GossipxError:
        """Return the gossipx error for an OpenSSL error; its message is one line that says whose fault it is."""
        if isinstance(error, ssl.SSLZeroReturnError):
            return errors.ConnectionClosedError(f"{self.remote} closed the connection")
        if isinstance(error, ssl.SSLCertVerificationError):
            subject = f"not authorised: the certificate of {self.remote}"
            if error.verify_code in _UNKNOWN_CA:  # either side may have the wrong CA
                return errors.NotAuthorisedError(f"{subject} was not signed by a CA in --tls-ca")
            fault = _CERTIFICATE_FAULTS.get(error.verify_code, f"is refused: {error.verify_message}")
            return errors.StrangerError(f"{subject} {fault.format(host=self._host)}")
        reason = error.reason or "unknown"
        if reason == _NO_CERTIFICATE:
            return errors.StrangerError(f"not authorised: {self.remote} gave no certificate")
        if reason in _ABOUT_DATES and (fault := self._dates.fault()):
            return errors.NotAuthorisedError(
                f"not authorised: {self.remote} says that the certificate of this peer {fault}"
            )
        if reason in _ALERTS:
            return errors.NotAuthorisedError(f"not authorised: {self.remote} {_ALERTS[reason]}")
        return errors.ProtocolError(f"{self.remote} violated the TLS 1.3 protocol ({reason.lower().replace('_', ' ')})")


class TlsListener:
    """A listener that wraps each stream of another transport's listener in a :class:`TlsStream`."""

    def __init__(self, below: Listener, wrap: Callable[[Stream], TlsStream]):
        self._below = below
        self._wrap = wrap

    @property
    def address(self) -> Address:
        """The address listened at."""
        return self._below.address

    def accept(self) -> TlsStream:
        """Wait for the next connection; its handshake has not begun."""
        return self._wrap(self._below.accept())

    def close(self) -> None:
        """Stop listening."""
        self._below.close()


class Tls:
    """Mutual TLS 1.3 over another transport; a :class:`gossipx.transports.Transport`.

    Args:
        certificate: PEM file of this peer's certificate, followed by intermediate certificates if there are any.
        key: PEM file of its private key, without a passphrase, readable by its owner only.
        authority: PEM file of the CA that signs the certificates of all peers.
        below: carries the encrypted bytes.

    Raises:
        UsageError: a file cannot be read or has the wrong content.
    """

    def __init__(self, certificate: Path, key: Path, authority: Path, below: Transport = tcp):
        self._below = below
        self._files = certificate, key, authority
        self._watched = WatchedFiles(*self._files)
        self._lock = threading.Lock()  # held while the files are read
        self._server, self._client, certificates = self._load()
        self._spare: list[memoryview] = []
        self.counts = Counters()
        self._dates = Reminder(certificates, self.counts)

    def listen(self, address: Address) -> TlsListener:
        """Listen; see :class:`gossipx.transports.Transport`. Warns if a certificate expires soon."""
        self._dates.remind()
        return TlsListener(self._below.listen(address), self._wrap)

    def connect(self, address: Address, deadline: float) -> TlsStream:
        """Connect and shake hands; see :class:`gossipx.transports.Transport`.

        Raises:
            StrangerError: the other side has no certificate for ``address.host`` that is valid now.
            NotAuthorisedError: the CAs differ.
        """
        stream = self._wrap(self._below.connect(address, deadline), address.host.partition("%")[0])
        with contextlib.ExitStack() as undo:
            undo.callback(stream.abort)
            stream.shake_hands(deadline)
            undo.pop_all()
        return stream

    def _wrap(self, below: Stream, host: str | None = None) -> TlsStream:
        self._renew()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if host is None:
            tls = self._server.wrap_bio(incoming, outgoing, server_side=True)
        else:
            tls = self._client.wrap_bio(incoming, outgoing, server_hostname=host)
        return TlsStream(below, tls, incoming, outgoing, host, self._spare, self._dates)

    def _renew(self) -> None:
        """Read the files again if one has changed."""
        with self._lock:
            if not self._watched.have_changed():
                return
            try:
                self._server, self._client, certificates = self._load()
            except errors.UsageError as error:
                log.warning("%s; what was read before stays in use", error)
                return
            self._dates.renew(certificates)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext, list[Validity]]:
        """Read the files; return OpenSSL's state of either side, and when the certificates are valid."""
        certificate, _, authority = self._files
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        # Only subject alternative names count; the common name is for people to read.
        client.hostname_checks_common_name = False
        with _reading(certificate, "--tls-cert", "a certificate"):
            own = validities_in(certificate)
        with _reading(authority, "--tls-ca", "a CA's certificate"):
            authorities = validities_in(authority)
        # Of several CAs, only one may matter.
        return server, client, [*own, *(authorities if len(authorities) == 1 else [])]

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        certificate, key, authority = self._files
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        with _reading(authority, "--tls-ca", "a CA's certificate"):
            context.load_verify_locations(authority)
        with _reading(certificate, "--tls-cert", "a certificate"):
            ssl.SSLContext(protocol).load_verify_locations(certificate)  # tells a bad certificate from a bad key
        with _reading(key, "--tls-key", f"the private key of {certificate}"):
            key.read_bytes()
            context.load_cert_chain(certificate, key, password=_no_passphrase)
        return context


@contextlib.contextmanager
def _reading(file: Path, option: str, what: str) -> Iterator[None]:
    """Return a context that converts errors of the system and of OpenSSL to a UsageError that names the file."""
    try:
        yield
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").lower().replace("_", " ")
        raise errors.UsageError(f"{option} is not {what} as PEM ({reason})", file) from error
    except OSError as error:
        raise errors.UsageError(f"cannot read {option}: {error.strerror}", file) from error


def _no_passphrase() -> str:
    """Refuse a key with a passphrase; without this callback OpenSSL would prompt for it on the terminal."""
    raise errors.UsageError("--tls-key has a passphrase, and nobody is there to type it: use a key without one")


def _same_host(certified: str, host: str) -> bool:
    """Return whether two hosts are the same name, or the same address in any notation."""
    try:
        return ipaddress.ip_address(certified.strip()) == ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return certified.lower() == host.lower()
