"""The time in which certificates are valid, read from their files, and warnings before it ends.

The module ssl shows the dates only of certificates that it has verified, which an expired one never is.
"""

from __future__ import annotations

import datetime
import logging
import math
import re
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gossipx.figures import Counters

log = logging.getLogger("gossipx")

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


def read(file: Path) -> list[Validity]:
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
    begins, ends = (_time(*one) for one in _elements(signed[version + 3][1]))  # after serial, algorithm and issuer
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


def _time(tag: int, content: bytes) -> float:
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    found = datetime.datetime.strptime(content.decode("ascii"), form)
    return found.replace(tzinfo=datetime.timezone.utc).timestamp()
