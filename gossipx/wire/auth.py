"""Authentication for runs with a shared secret: a mutual challenge, then a MAC on every frame.

It keeps processes that do not know the secret out of a run. It opens no socket, and takes its nonces as arguments.

::

    opener                                      answerer
      Open(nonce, run, opener, answerer)  ────→
                                          ←────  Challenge(nonce)
      Proof(proofs)                       ────→  if wrong: NotAuthorised, without details
      if wrong: close                     ←────  Accepted(proof)
      Hello and all later frames, each part of each frame with a MAC, both ways

Both proofs and both keys are derived from the secret by HKDF with SHA-256 (RFC 5869): extracted with both nonces as the
salt, and expanded over a label that contains the purpose, the side, the protocol version, the run and both names. Each
value is thus an HMAC-SHA256 over all of these, and none can stand in for another: a reflected proof is that of the
wrong side, and a replayed one belongs to other nonces.

While a secret is replaced, a peer has two. The opener proves both, and the answerer uses the first of its own that
the opener has proven. So the order in which machines get the new secret does not matter.

The opener proves first, because anybody may connect, but only the owner of a peer's address can be connected to. A
process without the secret learns nothing but a nonce.

A frame has two parts, the header with the metadata, and the payload. Each part ends with the HMAC-SHA256 over a counter
of the parts sent in this direction of this connection, and over the part itself. So nothing can be changed, dropped,
replayed, reordered, reflected or moved to another connection. HMAC-SHA256 is the fastest MAC in Python's standard
library on processors with SHA instructions; see the figures of ``bin/bench exchange``. Nothing is encrypted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gossipx.errors import NotAuthorisedError, ProtocolError, StrangerError
from gossipx.wire import Accepted, Challenge, Open, Proof, frames

NONCE_BYTES = 32
"""Length of each side's nonce, which must come from :func:`os.urandom`."""
REFUSAL = "the secrets differ; give every peer of the run the same secret"
"""The only explanation sent to a peer that cannot prove the secret."""


ANY = ""
"""In place of the run and of the answerer's name, for an opener that is not a member of the run."""


@dataclass(frozen=True, repr=False)
class Secret:
    """The secret shared by all peers of a run. Its value is never displayed."""

    value: bytes

    def __repr__(self) -> str:
        return "Secret(...)"


class Secrets(Protocol):
    """The secrets of a run, which may be replaced while it continues."""

    def valid(self) -> Sequence[Secret]:
        """Return the secrets that are accepted now, of which the first is preferred."""


@dataclass(frozen=True)
class FixedSecrets:
    """Secrets that stay the same during the run."""

    secrets: tuple[Secret, ...]

    def valid(self) -> Sequence[Secret]:
        return self.secrets


class Side(enum.Enum):
    """The two sides of a connection."""

    OPENER = b"opener"
    ANSWERER = b"answerer"


class MacChecks:
    """Creates the MACs of all parts of all frames in one direction, in order.

    Args:
        key: of this direction of this connection.
    """

    def __init__(self, key: bytes):
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def __call__(self) -> frames.Check:
        """Return the MAC of the next part."""
        check = self._keyed.copy()
        check.update(self._count.to_bytes(8, "big"))
        self._count += 1
        return check


@dataclass(frozen=True)
class Session:
    """The result of a handshake for one side.

    Attributes:
        sending, receiving: MACs of all later frames.
        opened: the Open that the connection began with.
    """

    sending: MacChecks
    receiving: MacChecks
    opened: Open


class Opener:
    """The side that connects.

    Args:
        secrets: shared by the run.
        run: id of the run.
        name: of this peer.
        to: name of the peer that should answer.
        nonce: random, of NONCE_BYTES.

    Attributes:
        opened: the first message to send.
    """

    def __init__(self, secrets: Sequence[Secret], *, run: str, name: str, to: str, nonce: bytes):
        self.opened = Open(nonce.hex(), run, name, to)
        self._secrets = secrets
        self._keys: list[_Keys] = []

    def challenged(self, challenge: Challenge) -> Proof:
        """Handle the answerer's nonce; return the proofs to send."""
        self._keys = [_Keys(secret, self.opened, challenge.nonce) for secret in self._secrets]
        return Proof(tuple(keys.derive(b"proof", Side.OPENER).hex() for keys in self._keys))

    def accepted(self, accepted: Accepted) -> Session:
        """Check the answerer's proof.

        Raises:
            StrangerError: it is wrong; a peer that knows a secret would have rejected our proofs instead.
        """
        for keys in _known(self._keys):
            if keys.proves(accepted.proof, Side.ANSWERER):
                return keys.session(Side.OPENER)
        raise StrangerError("not authorised: the process at this address does not know the run's secret")


class Answerer:
    """The side that was connected to.

    Args:
        secrets: shared by the run.
        nonce: random, of NONCE_BYTES.
    """

    def __init__(self, secrets: Sequence[Secret], nonce: bytes):
        self._secrets = secrets
        self._nonce = nonce.hex()
        self._keys: list[_Keys] = []

    def opened(self, opened: Open) -> Challenge:
        """Return the challenge by which the other side proves that it is ``opened.opener``."""
        self._keys = [_Keys(secret, opened, self._nonce) for secret in self._secrets]
        return Challenge(self._nonce)

    def proven(self, proof: Proof) -> tuple[Accepted, Session]:
        """Check the opener's proofs; return the reply, after which all frames are authenticated.

        The caller must still check with :func:`misdirected` that ``session.opened`` is meant for this peer.

        Raises:
            NotAuthorisedError: all are wrong. The opener may be sent :data:`REFUSAL`.
        """
        for keys in _known(self._keys):
            if any(keys.proves(one, Side.OPENER) for one in proof.proofs):
                return Accepted(keys.derive(b"proof", Side.ANSWERER).hex()), keys.session(Side.ANSWERER)
        raise NotAuthorisedError(f"not authorised: {REFUSAL}")


def misdirected(opened: Open, name: str) -> str | None:
    """Return in one line why an authenticated ``opened`` is not meant for the peer called ``name``; None if it is.

    Without this check, an attacker could redirect a connection to another peer, or back to its opener. A process that
    asks to join a run names nobody, as it knows only the address of a peer; it may not send Hello then.
    """
    if opened.answerer in (name, ANY):
        return None
    if opened.opener == name:
        advice = "on one machine, each peer needs a port or a --bind address of its own"
        return f"this is {name} itself, not {opened.answerer}; {advice}"
    return f"this is {name}, not {opened.answerer}; start every peer with the same hosts file"


class _Keys:
    """Derives keys and proofs of one connection from one secret; ``nonce`` is the answerer's."""

    def __init__(self, secret: Secret, opened: Open, nonce: str):
        self._opened = opened
        self._extracted = _hmac(bytes.fromhex(opened.nonce + nonce), secret.value)

    def derive(self, purpose: bytes, side: Side) -> bytes:
        """Return 32 bytes for one purpose of one side: the first and only block of HKDF."""
        version = frames.VERSION.to_bytes(2, "big")
        names = (self._opened.run.encode(), self._opened.opener.encode(), self._opened.answerer.encode())
        parts = (b"gossipx", purpose, side.value, version, *names)
        # Each part is prefixed with its length, so that different lists of parts never encode to the same bytes.
        info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return _hmac(self._extracted, info + b"\x01")

    def proves(self, proof: str, side: Side) -> bool:
        return hmac.compare_digest(bytes.fromhex(proof), self.derive(b"proof", side))

    def session(self, side: Side) -> Session:
        checks = {each: MacChecks(self.derive(b"frames", each)) for each in Side}
        other = Side.ANSWERER if side is Side.OPENER else Side.OPENER
        return Session(checks[side], checks[other], self._opened)


def _known(keys: Sequence[_Keys]) -> Sequence[_Keys]:
    if not keys:
        raise ProtocolError("a proof was received before both nonces")
    return keys


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
