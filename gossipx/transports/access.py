"""Access control: which processes may connect to a peer, as a transport and a shared secret made from the settings.

On loopback every process of this machine may connect. Any other address requires a shared secret, which authenticates,
or mutual TLS, which authenticates and encrypts.
"""

from __future__ import annotations

import codecs
import ipaddress
import logging
import os
import shlex
import socket
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gossipx.errors import UsageError
from gossipx.protocol.fields import MAX_SECRETS
from gossipx.settings.sections import ExchangeSettings
from gossipx.transports import Transport, tcp
from gossipx.transports.tls import Tls, WatchedFiles
from gossipx.wire.auth import FixedSecrets, Secret, Secrets

log = logging.getLogger("gossipx")

SECRET_VARIABLE = "GOSSIPX_SECRET"
"""Environment variable with the secret, or with two on two lines; used if --secret-file is not given."""
LEAST_SECRET = 16
"""Minimum length of a secret in bytes: 128 bits if they are random, which cannot be guessed."""
MOST_SECRET = 4096
"""Maximum length of a secret in bytes; a longer file is probably not a secret."""
_MOST_CONTENT = MAX_SECRETS * (MOST_SECRET + 2)  # with the ends of the lines
MAKE_SECRET = "(umask 077; openssl rand -hex 32 > secret)"
_TLS = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True)
class Access:
    """How a peer connects and authenticates.

    Attributes:
        transport: TCP, or mutual TLS over TCP.
        secret: the shared secrets; None: there is no authentication by secret.
        share_memory: whether peers on one machine may use shared memory instead of TCP. False with TLS, whose
            connection authenticates the peers.
    """

    transport: Transport
    secret: Secrets | None
    share_memory: bool


def grant(exchange: ExchangeSettings, bind: str) -> Access:
    """Return how a peer that listens on ``bind`` connects and authenticates.

    Raises:
        UsageError: other machines could connect without authentication, or a file is unusable.
    """
    given = {name: getattr(exchange, name) for name in _TLS if getattr(exchange, name) is not None}
    if given and len(given) < len(_TLS):
        missing = next(name for name in _TLS if name not in given)
        raise UsageError(f"--tls-cert, --tls-key and --tls-ca belong together: {_option(missing)} is missing")
    secret = _secret(exchange)
    if given and secret is not None:
        source = "--secret-file" if exchange.secret_file else SECRET_VARIABLE
        raise UsageError(f"{source} and --tls-cert exclude each other: give only one of them")
    if given:
        certificate, key, authority = (Path(given[name]) for name in _TLS)
        _read_own(key, "--tls-key")
        if exchange.transport == "shm":
            raise UsageError(
                "--transport shm does not use TLS, which authenticates the peers: use auto, or --secret-file"
            )
        return Access(Tls(certificate, key, authority), None, share_memory=False)
    if secret is None and not is_loopback(bind):
        raise UsageError(
            f"--bind {bind} lets other machines connect: give --secret-file FILE (or {SECRET_VARIABLE}), "
            "or --tls-cert FILE --tls-key FILE --tls-ca FILE"
        )
    return Access(tcp, secret, share_memory=exchange.transport in ("auto", "shm"))


def uncovered(exchange: ExchangeSettings, bind: str) -> str | None:
    """Return a warning about model bytes that others could read or change, in one line; None if there is no risk.

    gloo and NCCL support neither secrets nor certificates.
    """
    if exchange.transport not in ("gloo", "nccl") or is_loopback(bind):
        return None
    how = "its digest is sent over TLS" if exchange.tls_cert else "its MAC is checked"
    return (
        f"--transport {exchange.transport} has neither authentication nor encryption: models are sent in plain text;"
        f" a model changed in transit is refused, since {how}; use it only in networks that you trust"
    )


def is_loopback(host: str) -> bool:
    """Return whether a socket that listens on ``host`` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


class SecretFile:
    """The secrets in a file, one per line, which are read again when the file has changed; thread-safe.

    Args:
        file: readable by its owner only.

    Raises:
        UsageError: the file cannot be used.
    """

    def __init__(self, file: Path):
        self._file = file
        self._watched = WatchedFiles(file)
        self._lock = threading.Lock()
        self._secrets = self._read()

    def valid(self) -> Sequence[Secret]:
        """Return the secrets in the file; those that it had before, with a warning, if it cannot be used any more."""
        with self._lock:
            if self._watched.have_changed():
                try:
                    self._secrets = self._read()
                except UsageError as error:
                    log.warning("%s; the secrets that it had before stay valid", error)
            return self._secrets

    def _read(self) -> tuple[Secret, ...]:
        return _checked(_read_own(self._file, "--secret-file"), "--secret-file", self._file)


def _secret(exchange: ExchangeSettings) -> Secrets | None:
    if exchange.secret_file is not None:
        return SecretFile(Path(exchange.secret_file))
    value = os.environ.get(SECRET_VARIABLE)
    return None if value is None else FixedSecrets(_checked(os.fsencode(value), SECRET_VARIABLE))


def _checked(content: bytes, source: str, file: Path | None = None) -> tuple[Secret, ...]:
    """Return the secrets, one per line, of which none may be guessable."""
    if content.startswith(codecs.BOM_UTF16_LE) and b"\0" in content:  # 'echo ... > secret' in PowerShell
        raise UsageError(f"{source} is UTF-16 text: save it as UTF-8, as the other machines have it", file)
    # Windows editors write a byte order mark, which the same secret on other machines does not have.
    values = [line for line in content.removeprefix(codecs.BOM_UTF8).splitlines() if line] or [b""]
    if len(content) > _MOST_CONTENT or max(map(len, values)) > MOST_SECRET:
        raise UsageError(f"{source} holds more than {MOST_SECRET} bytes: is it another file?", file)
    if len(values) > MAX_SECRETS:
        raise UsageError(f"{source} has {len(values)} lines: one secret per line, and at most {MAX_SECRETS}", file)
    shortest = min(map(len, values))
    if shortest < LEAST_SECRET:
        where = "" if len(values) == 1 else " on a line"
        least = f"at least {LEAST_SECRET}, and random: {MAKE_SECRET}"
        raise UsageError(f"{source} holds {shortest} bytes{where}, which could be guessed; {least}", file)
    return tuple(map(Secret, values))


def _read_own(file: Path, option: str) -> bytes:
    """Return the start of a file that only its owner may read; long enough to detect a secret that is too long."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for the writer of a pipe
        try:
            mode = os.fstat(opened).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"{option} is not a regular file", file)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"others can read {option}: chmod 600 {shlex.quote(str(file))}", file)
            return os.read(opened, _MOST_CONTENT + 1)
        finally:
            os.close(opened)
    except OSError as error:
        raise UsageError(f"cannot read {option}: {error.strerror}", file) from error


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
