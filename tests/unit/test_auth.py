"""The handshake of a run with a secret, as transcripts, and the MAC of every frame."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from drawn_frames import feed
from hypothesis import given
from hypothesis import strategies as st
from joined_frames import joined

from gossipx.errors import NotAuthorisedError, ProtocolError, StrangerError
from gossipx.figures import Counters
from gossipx.memory import Source
from gossipx.protocol.fields import SMALL_METADATA
from gossipx.protocol.messages import ModelReply, NotReadyReply, PullRequest
from gossipx.transports import handshake
from gossipx.transports.handshake import Trust
from gossipx.wire import Accepted, Bytes, Challenge, Message, Open, Proof, frames
from gossipx.wire.auth import Answerer, MacChecks, Opener, Secret, Session, misdirected

SECRET = Secret(b"sixteen bytes or more of it")
NONCES = bytes(range(32)), bytes(range(100, 132))


def opener(*secrets: Secret, nonce: bytes = NONCES[0]) -> Opener:
    return Opener(secrets or (SECRET,), run="the list", name="ada", to="bob", nonce=nonce)


def answerer(*secrets: Secret, nonce: bytes = NONCES[1]) -> Answerer:
    return Answerer(secrets or (SECRET,), nonce)


def shake_hands(
    one: Opener, other: Answerer, on_the_way: Callable[[Message], Message] = lambda message: message
) -> tuple[Session, Session]:
    """Return both sides' sessions; all messages pass through ``on_the_way``."""
    challenge = other.opened(on_the_way(one.opened))  # type: ignore[arg-type]
    proof = one.challenged(on_the_way(challenge))  # type: ignore[arg-type]
    accepted, theirs = other.proven(on_the_way(proof))  # type: ignore[arg-type]
    return one.accepted(on_the_way(accepted)), theirs  # type: ignore[arg-type]


def whole(session: Session, message: Message, payload: bytes = b"") -> bytes:
    return joined(frames.encode(message, 0, Source(memoryview(payload)) if payload else None, session.sending))


class Receiver:
    """Receives frames of a session, with a buffer for a payload of eight bytes."""

    def __init__(self, session: Session):
        self.buffer = memoryview(bytearray(8))
        self._decoder = frames.Decoder(lambda got, _: Bytes(self.buffer) if isinstance(got, ModelReply) else None)
        self._decoder.use(session.receiving)

    def take(self, data: bytes) -> list[Message]:
        return [frame.message for frame in feed(self._decoder, data)]


# --- the handshake ------------------------------------------------------------------------------


def test_peers_with_the_same_secret_admit_and_understand_each_other() -> None:
    one, other = shake_hands(opener(), answerer())
    assert one.opened == other.opened == Open(NONCES[0].hex(), "the list", "ada", "bob")
    for sender, receiver in ((one, other), (other, one)):
        to = Receiver(receiver)
        sent = (
            whole(sender, PullRequest(1, 30.0))
            + whole(sender, ModelReply(2), b"8 bytes.")
            + whole(sender, PullRequest(3, 30.0))
        )
        assert to.take(sent) == [PullRequest(1, 30.0), ModelReply(2), PullRequest(3, 30.0)]
        assert bytes(to.buffer) == b"8 bytes."


def test_a_proof_is_the_hmac_of_both_nonces_the_run_the_side_the_names_and_the_version() -> None:
    one = opener()
    proof = one.challenged(Challenge(NONCES[1].hex()))
    key = hmac.digest(NONCES[0] + NONCES[1], SECRET.value, "sha256")  # RFC 5869, extract
    parts = [b"gossipx", b"proof", b"opener", frames.VERSION.to_bytes(2, "big"), b"the list", b"ada", b"bob"]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    assert proof.proofs == (hmac.digest(key, info + b"\1", "sha256").hex(),)  # ... and expand


def test_a_stranger_learns_a_nonce_and_nothing_else() -> None:
    assert msgspec.structs.astuple(answerer().opened(Open("0" * 64, "", "", ""))) == (NONCES[1].hex(),)


@pytest.mark.fault(18)
def test_a_wrong_secret_is_refused_by_either_side() -> None:
    wrong = Secret(b"another one of many bytes")
    with pytest.raises(NotAuthorisedError, match="secrets differ") as refused:
        shake_hands(opener(wrong), answerer())
    assert refused.value.exit_code == 5
    one = opener()
    one.challenged(Challenge(NONCES[1].hex()))
    impostor = opener(wrong), answerer(wrong)
    accepted, _ = impostor[1].proven(impostor[0].challenged(impostor[1].opened(impostor[0].opened)))
    with pytest.raises(StrangerError):
        one.accepted(accepted)


OLD, NEW = Secret(b"the old secret of the run"), Secret(b"the new secret of the run")
STAGES = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]


@pytest.mark.parametrize("own", range(4))
@pytest.mark.parametrize("others", range(4))
def test_machines_one_step_apart_in_a_rotation_admit_each_other(own: int, others: int) -> None:
    """The operator's steps: add the new secret as the second line, swap the lines, remove the old one."""
    one, other = opener(*STAGES[own]), answerer(*STAGES[others])
    if {own, others} == {0, 3}:  # no secret in common
        with pytest.raises(NotAuthorisedError, match="secrets differ"):
            shake_hands(one, other)
        return
    session, theirs = shake_hands(one, other)
    assert Receiver(theirs).take(whole(session, PullRequest(1, 30.0))) == [PullRequest(1, 30.0)]
    assert Receiver(session).take(whole(theirs, PullRequest(2, 30.0))) == [PullRequest(2, 30.0)]


@pytest.mark.parametrize(
    "changed",
    [
        {"nonce": "f" * 64},
        {"run": "another"},
        {"opener": "eve"},
        {"answerer": "eve"},
        {"opener": "adab", "answerer": "ob"},
    ],
    ids=["nonce", "run", "opener", "answerer", "a byte moved from one field to the next"],
)
def test_no_field_of_the_opening_can_be_changed_on_the_way(changed: dict[str, str]) -> None:
    def change(message: Message) -> Message:
        return msgspec.structs.replace(message, **changed) if isinstance(message, Open) else message

    with pytest.raises(NotAuthorisedError):
        shake_hands(opener(), answerer(), change)


@given(which=st.sampled_from([Open, Challenge, Proof, Accepted]), bit=st.integers(0, 255))
def test_no_bit_of_a_nonce_or_a_proof_can_be_changed_on_the_way(which: type, bit: int) -> None:
    def flip(message: Message) -> Message:
        if not isinstance(message, which):
            return message
        if isinstance(message, Proof):
            return Proof((f"{int(message.proofs[0], 16) ^ 1 << bit:064x}",))
        name = "proof" if isinstance(message, Accepted) else "nonce"
        value = int(getattr(message, name), 16) ^ 1 << bit
        return msgspec.structs.replace(message, **{name: f"{value:064x}"})

    with pytest.raises(StrangerError if which is Accepted else NotAuthorisedError):
        shake_hands(opener(), answerer(), flip)


@pytest.mark.fault(19)
def test_a_replayed_handshake_is_refused() -> None:
    heard: list[Message] = []

    def listen(message: Message) -> Message:
        heard.append(message)
        return message

    shake_hands(opener(), answerer(), listen)
    opened, _, proof, _ = heard
    again = answerer(nonce=bytes(32))
    again.opened(opened)  # type: ignore[arg-type]
    with pytest.raises(NotAuthorisedError):
        again.proven(proof)  # type: ignore[arg-type]


@pytest.mark.fault(19)
def test_a_reflected_proof_is_refused() -> None:
    one = opener()
    for nonce in (NONCES[1].hex(), one.opened.nonce):  # the second is its own
        proof = one.challenged(Challenge(nonce))
        with pytest.raises(StrangerError):
            one.accepted(Accepted(proof.proofs[0]))


@pytest.mark.fault(19)
def test_a_connection_relayed_to_its_opener_or_to_a_third_peer_is_refused() -> None:
    one, same = opener(), answerer()  # both are ada's: an attacker connects ada to itself
    _, session = same.proven(one.challenged(same.opened(one.opened)))
    assert str(misdirected(session.opened, "ada")).startswith("this is ada itself, not bob; on one machine, ")
    assert misdirected(session.opened, "carol") == "this is carol, not bob; start every peer with the same hosts file"
    assert misdirected(session.opened, "bob") is None


def test_proofs_out_of_order_are_refused() -> None:
    with pytest.raises(ProtocolError):
        answerer().proven(Proof(("0" * 64,)))
    with pytest.raises(ProtocolError):
        opener().accepted(Accepted("0" * 64))


@pytest.mark.fault(16)
def test_another_version_has_other_proofs(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = opener(), answerer()
    proof = one.challenged(other.opened(one.opened))
    monkeypatch.setattr(frames, "VERSION", frames.VERSION + 1)
    with pytest.raises(NotAuthorisedError):
        other.proven(proof)


def test_a_secret_is_never_shown() -> None:
    assert "sixteen" not in f"{SECRET!r} {SECRET} {[SECRET]} {opener().__dict__}"


# --- the MAC of every frame ---------------------------------------------------------------------


def test_the_bytes_of_a_mac() -> None:
    checks = MacChecks(b"key")
    for count in range(3):
        check = checks()
        check.update(b"a part")
        assert check.digest() == hmac.new(b"key", count.to_bytes(8, "big") + b"a part", hashlib.sha256).digest()


MESSAGES = [PullRequest(1, 30.0), ModelReply(2), NotReadyReply("later"), ModelReply(3)]


def sent(session: Session) -> list[bytes]:
    return [whole(session, each, b"8 bytes." if isinstance(each, ModelReply) else b"") for each in MESSAGES]


@given(order=st.lists(st.integers(0, 3), max_size=6))
@pytest.mark.fault(26)
def test_frames_are_accepted_only_in_order(order: list[int]) -> None:
    one, other = shake_hands(opener(), answerer())
    data, receiver = sent(one), Receiver(other)
    fitting = next((at for at, index in enumerate(order) if at != index), len(order))
    for index in order[:fitting]:
        assert receiver.take(data[index]) == [MESSAGES[index]]
    for index in order[fitting : fitting + 1]:
        with pytest.raises(ProtocolError, match="does not match"):
            receiver.take(data[index])


@given(place=st.integers(0), change=st.integers(1, 255))
@pytest.mark.fault(12)
def test_no_byte_of_a_frame_can_be_changed(place: int, change: int) -> None:
    one, other = shake_hands(opener(), answerer())
    data = bytearray(b"".join(sent(one)))
    data[place % len(data)] ^= change
    taken: list[Message] = []
    receiver = Receiver(other)
    with pytest.raises(ProtocolError):
        for byte in bytes(data) + bytes(2**20):  # a larger length field makes it wait for more
            taken += receiver.take(bytes([byte]))
    assert taken == MESSAGES[: len(taken)]
    assert len(taken) < len(MESSAGES)


def test_a_payload_cannot_stand_for_a_header_nor_move_to_another_frame() -> None:
    one, other = shake_hands(opener(), answerer())
    first, second = whole(one, ModelReply(2), b"8 bytes."), whole(one, ModelReply(3), b"8 bytes.")
    tail = 8 + 32
    with pytest.raises(ProtocolError, match="payload"):
        Receiver(other).take(first[:-tail] + second[-tail:])


@pytest.mark.fault(19)
def test_reflected_frames_those_of_another_connection_and_those_with_a_checksum_are_refused() -> None:
    one, other = shake_hands(opener(), answerer())
    _, of_another = shake_hands(opener(), answerer(nonce=bytes(32)))
    frame, checked = whole(one, PullRequest(1, 30.0)), joined(frames.encode(PullRequest(1, 30.0), 0))
    for receiver, data in ((one, frame), (of_another, frame), (other, checked + bytes(32))):
        with pytest.raises(ProtocolError, match="does not match"):
            Receiver(receiver).take(data)


@pytest.mark.fault(14)
def test_a_stranger_cannot_ask_for_more_than_the_small_bound() -> None:
    decoder = frames.Decoder(lambda message, request: None, SMALL_METADATA)
    header = frames._HEADER.pack(frames.MAGIC, frames.VERSION, 18, 0, SMALL_METADATA + 1, 0) + bytes(8)
    decoder.next_buffer()[: len(header)] = header
    with pytest.raises(ProtocolError, match=str(SMALL_METADATA)):
        decoder.received(len(header))


# --- Trust: when strangers are logged, and when a peer takes itself for a stranger. The clock is simulat


REFUSED = NotAuthorisedError("not authorised: why")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(now=1000.0, monotonic=lambda: made.now)
    monkeypatch.setattr(handshake, "time", made)
    return made


def test_a_peer_turned_away_by_all_others_is_an_outcast_at_once_unless_one_admitted_it(clock: Any) -> None:
    own, admitted = Trust(2, 30.0, Counters()), Trust(2, 30.0, Counters())
    admitted.record_admission()
    for rank in (1, 1, 2):
        assert not own.is_outcast
        own.record_rejection(rank, REFUSED)
        admitted.record_rejection(rank, REFUSED)
    assert own.is_outcast
    clock.now += 60
    assert not admitted.is_outcast


def test_a_peer_turned_away_by_some_waits_for_others_until_half_of_peer_timeout(clock: Any) -> None:
    own, nobody_there = Trust(5, 30.0, Counters()), Trust(5, 30.0, Counters())
    own.record_rejection(1, REFUSED)
    clock.now += 15
    assert not own.is_outcast
    clock.now += 0.1
    assert own.is_outcast
    assert not nobody_there.is_outcast


def test_strangers_are_logged_once_a_minute_and_all_counted(clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "gossipx")
    own = Trust(2, 30.0, Counters())
    for _ in range(5):
        own.record_stranger("192.0.2.1:7", REFUSED)
    clock.now += 60
    own.record_stranger("192.0.2.1:8", REFUSED)
    assert [record.getMessage() for record in caplog.records] == [
        "a connection from 192.0.2.1:7: not authorised: why",
        "a connection from 192.0.2.1:8: not authorised: why (4 more turned away before)",
    ]
    assert own._counts["strangers"] == 6


def test_a_peer_without_others_knows_whether_one_was_refused(clock: Any) -> None:
    own = Trust(2, 30.0, Counters())
    own.record_stranger("192.0.2.1:7", StrangerError("not authorised: it gave no certificate"))
    assert own.doubt is None  # a port scanner could cause it
    own.record_stranger("192.0.2.1:7", REFUSED)
    assert own.doubt is REFUSED
    assert not own.is_outcast
    own.record_admission()
    assert own.doubt is None
