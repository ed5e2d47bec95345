"""Authentication of a run that has a shared secret: a challenge both ways, then a MAC on everything.

It keeps strangers out of a run. It opens no socket, and takes its nonces as arguments.

::

    opener                                      answerer
      Open(nonce, run, opener, answerer)  ────→
                                          ←────  Challenge(nonce)
      Proof(proof)                        ────→  wrong: NotAuthorised, which says no more
      wrong: close                        ←────  Accepted(proof)
      Hello and all that follows, each part of each frame with a MAC, both ways

Both proofs and both keys are derived from the secret by HKDF with SHA-256 (RFC 5869): extracted with both nonces as the
salt, expanded over a label that names the purpose and the side, the protocol's version, the run and both names. Each of
them is thus an HMAC-SHA256 over all of these, and none can stand for another: a proof that is sent back is the wrong
side's, one that is repeated belongs to other nonces.

The opener proves first: anybody may connect, while only the holder of a peer's address can be connected to. A stranger
that connects learns nothing but a nonce.

A frame's parts are its header with the metadata, and its payload. Each ends in the HMAC-SHA256 of a number that counts
the parts sent in this direction of this connection, and the part: nothing can be changed, left out, repeated, moved,
sent back or carried over to another connection. HMAC-SHA256 is the fastest MAC that Python's standard library has on
processors with instructions for SHA; see the figures of ``bin/bench exchange``. Nothing is encrypted.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from dataclasses import dataclass

from gossipx.errors import NotAuthorisedError, ProtocolError, StrangerError
from gossipx.wire import Accepted, Challenge, Open, Proof, frames

NONCE_BYTES = 32
"""Length of each side's nonce, which must come from :func:`os.urandom`."""
REFUSAL = "the secrets differ; give every peer of the run the same"
"""All that a peer is told which cannot prove the secret."""


@dataclass(frozen=True, repr=False)
class Secret:
    """Known to all peers of a run and to nobody else; its value is never shown."""

    value: bytes

    def __repr__(self) -> str:
        return "Secret(...)"


class Side(enum.Enum):
    """The two sides of a connection."""

    OPENER = b"opener"
    ANSWERER = b"answerer"


class MacChecks:
    """Makes the check of each part of each frame that goes in one direction, in order.

    Args:
        key: of this direction of this connection.
    """

    def __init__(self, key: bytes):
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def __call__(self) -> frames.Check:
        """Return the check of the next part."""
        check = self._keyed.copy()
        check.update(self._count.to_bytes(8, "big"))
        self._count += 1
        return check


@dataclass(frozen=True)
class Session:
    """The result of a handshake, for one side.

    Attributes:
        sending, receiving: checks of all further frames.
        opened: what the connection was opened for.
    """

    sending: MacChecks
    receiving: MacChecks
    opened: Open


class Opener:
    """The side that connects.

    Args:
        secret: shared by the run.
        run: its id.
        name: of this peer; ``to``: of the peer that should answer.
        nonce: fresh, of NONCE_BYTES.

    Attributes:
        opened: goes out first.
    """

    def __init__(self, secret: Secret, *, run: str, name: str, to: str, nonce: bytes):
        self.opened = Open(nonce.hex(), run, name, to)
        self._secret = secret
        self._keys: _Keys | None = None

    def challenged(self, challenge: Challenge) -> Proof:
        """Take the answerer's nonce and return the proof that answers it."""
        self._keys = _Keys(self._secret, self.opened, challenge.nonce)
        return Proof(self._keys.derive(b"proof", Side.OPENER).hex())

    def accepted(self, accepted: Accepted) -> Session:
        """Take the answerer's proof.

        Raises:
            StrangerError: it proves nothing; a peer that knows the secret would have refused ours.
        """
        keys = _known(self._keys)
        if not keys.proves(accepted.proof, Side.ANSWERER):
            raise StrangerError("not authorised: what answers there accepts a proof that it cannot give")
        return keys.session(Side.OPENER)


class Answerer:
    """The side that was connected to.

    Args:
        secret: shared by the run.
        nonce: fresh, of NONCE_BYTES.
    """

    def __init__(self, secret: Secret, nonce: bytes):
        self._secret = secret
        self._nonce = nonce.hex()
        self._keys: _Keys | None = None

    def opened(self, opened: Open) -> Challenge:
        """Return the challenge to prove that the other side is ``opened.opener``, as it claims."""
        self._keys = _Keys(self._secret, opened, self._nonce)
        return Challenge(self._nonce)

    def proven(self, proof: Proof) -> tuple[Accepted, Session]:
        """Take the opener's proof and return the answer to it, after which all frames are authenticated.

        The caller must still check that ``session.opened`` is meant for this peer: see :func:`misdirected`.

        Raises:
            NotAuthorisedError: it proves nothing. The opener may be told :data:`REFUSAL`.
        """
        keys = _known(self._keys)
        if not keys.proves(proof.proof, Side.OPENER):
            raise NotAuthorisedError(f"not authorised: {REFUSAL}")
        return Accepted(keys.derive(b"proof", Side.ANSWERER).hex()), keys.session(Side.ANSWERER)


def misdirected(opened: Open, name: str) -> str | None:
    """Return why a proven ``opened`` is not meant for the peer of this name, in one line; None if it is.

    Without this check, a connection to one peer could be carried to another, or back to the one that opened it.
    """
    if opened.answerer == name:
        return None
    return f"this is {name}, not {opened.answerer}; start every peer with the same hosts file"


class _Keys:
    """Derives keys and proofs of one connection; ``nonce`` is the answerer's."""

    def __init__(self, secret: Secret, opened: Open, nonce: str):
        self._opened = opened
        self._extracted = _hmac(bytes.fromhex(opened.nonce + nonce), secret.value)

    def derive(self, purpose: bytes, side: Side) -> bytes:
        """Return 32 bytes for one purpose of one side: HKDF's first and only block."""
        version = frames.VERSION.to_bytes(2, "big")
        names = (self._opened.run.encode(), self._opened.opener.encode(), self._opened.answerer.encode())
        parts = (b"gossipx", purpose, side.value, version, *names)
        # With their lengths, so that no two lists of parts read the same.
        info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return _hmac(self._extracted, info + b"\x01")

    def proves(self, proof: str, side: Side) -> bool:
        return hmac.compare_digest(bytes.fromhex(proof), self.derive(b"proof", side))

    def session(self, side: Side) -> Session:
        checks = {each: MacChecks(self.derive(b"frames", each)) for each in Side}
        other = Side.ANSWERER if side is Side.OPENER else Side.OPENER
        return Session(checks[side], checks[other], self._opened)


def _known(keys: _Keys | None) -> _Keys:
    if keys is None:
        raise ProtocolError("a proof came before both nonces")
    return keys


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
