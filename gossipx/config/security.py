"""Who may talk: what a run's settings say of it, as a transport and a secret.

Loopback is open to whoever is on this machine. Any other address needs a shared secret, which authenticates, or mutual
TLS, which also encrypts.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import shlex
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossipx.config.settings import ExchangeSettings
from gossipx.errors import UsageError
from gossipx.transports import Transport, tcp
from gossipx.transports.tls import Tls
from gossipx.wire.auth import Secret

SECRET_VARIABLE = "GOSSIPX_SECRET"
"""Environment variable that holds the secret, where --secret-file is not given."""
LEAST_SECRET = 16
"""Bytes of a secret: 128 bits if they are random, which nobody guesses."""
MOST_SECRET = 4096
"""... above which the file is taken for another."""
MAKE_SECRET = "(umask 077; openssl rand -hex 32 > secret)"
_TLS = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True)
class Access:
    """How connections are made, and what they begin with.

    Attributes:
        transport: TCP, or mutual TLS over it.
        secret: None: there is none.
        share_memory: whether peers on one machine may pass TCP by. Not where TLS tells who they are.
    """

    transport: Transport
    secret: Secret | None
    share_memory: bool


def grant(exchange: ExchangeSettings, bind: str) -> Access:
    """What the settings give, to a peer that listens on ``bind``.

    Raises:
        UsageError: other machines could connect and nothing is asked of them, or a file is not what it should be.
    """
    given = {name: getattr(exchange, name) for name in _TLS if getattr(exchange, name) is not None}
    if given and len(given) < len(_TLS):
        missing = next(name for name in _TLS if name not in given)
        raise UsageError(f"--tls-cert, --tls-key and --tls-ca belong together: {_option(missing)} is missing")
    secret = _secret(exchange)
    if given and secret is not None:
        source = "--secret-file" if exchange.secret_file else SECRET_VARIABLE
        raise UsageError(f"{source} and --tls-cert are two ways to know the peers: give one of them")
    if given:
        certificate, key, authority = (Path(given[name]) for name in _TLS)
        _read_own(key, "--tls-key")
        if exchange.transport == "shm":
            raise UsageError("--transport shm passes TLS by, which tells who the peers are: use auto, or --secret-file")
        return Access(Tls(certificate, key, authority), None, share_memory=False)
    if secret is None and not is_loopback(bind):
        raise UsageError(
            f"--bind {bind} lets other machines connect: give --secret-file FILE (or {SECRET_VARIABLE}), "
            "or --tls-cert FILE --tls-key FILE --tls-ca FILE"
        )
    return Access(tcp, secret, share_memory=exchange.transport in ("auto", "shm"))


def uncovered(exchange: ExchangeSettings, bind: str) -> str | None:
    """What a user should know of the bytes of models that others could get at, in one line; None if there is nothing.

    gloo and NCCL know neither secrets nor certificates.
    """
    if exchange.transport not in ("gloo", "nccl") or is_loopback(bind):
        return None
    how = "its digest goes over TLS" if exchange.tls_cert else "a MAC of it is checked"
    return (
        f"--transport {exchange.transport} has neither authentication nor encryption of its own: models travel in the"
        f" clear, and one that was changed on the way is refused, as {how}; keep its ports to networks that you trust"
    )


def absolute(exchange: ExchangeSettings) -> ExchangeSettings:
    """The same settings for processes that may run in another directory."""
    given = {name: getattr(exchange, name) for name in (*_TLS, "secret_file")}
    files: dict[str, Any] = {name: str(Path(file).absolute()) for name, file in given.items() if file}
    return dataclasses.replace(exchange, **files)


def is_loopback(host: str) -> bool:
    """Whether who listens on ``host`` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)


def _secret(exchange: ExchangeSettings) -> Secret | None:
    if exchange.secret_file is not None:
        file = Path(exchange.secret_file)
        return _checked(_read_own(file, "--secret-file"), "--secret-file", file)
    value = os.environ.get(SECRET_VARIABLE)
    return None if value is None else _checked(os.fsencode(value), SECRET_VARIABLE)


def _checked(content: bytes, source: str, file: Path | None = None) -> Secret:
    value = content.rstrip(b"\r\n")
    if len(value) < LEAST_SECRET:
        least = f"at least {LEAST_SECRET}, and random: {MAKE_SECRET}"
        raise UsageError(f"{source} holds {len(value)} bytes, which could be guessed; {least}", file)
    if len(value) > MOST_SECRET:
        raise UsageError(f"{source} holds more than {MOST_SECRET} bytes: is it another file?", file)
    return Secret(value)


def _read_own(file: Path, option: str) -> bytes:
    """The start of a file that only its owner may read; long enough to tell whether it is too long for a secret."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for the writer of a pipe
        try:
            mode = os.fstat(opened).st_mode
            if not stat.S_ISREG(mode):
                raise UsageError(f"{option} is no regular file, which every peer could read", file)
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise UsageError(f"others can read {option}: chmod 600 {shlex.quote(str(file))}", file)
            return os.read(opened, MOST_SECRET + 3)  # with the end of a line
        finally:
            os.close(opened)
    except OSError as error:
        raise UsageError(f"cannot read {option}: {error.strerror}", file) from error


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
