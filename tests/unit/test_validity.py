"""The dates of certificates: what is read from a file, and when a peer warns. The clock is simulated."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from certificates import Authority

from gossipx.figures import Counters
from gossipx.transports import Address, tls
from gossipx.transports.tls import Reminder, Validity, validities_in

HOUR, DAY = 3600.0, 86400.0


class Clock:
    now = 1_800_000_000.0
    monotonic = staticmethod(time.monotonic)

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tls, "time", made)
    return made


@pytest.mark.parametrize(("begins", "days"), [(-9.0, 30.0), (2.0, 365.0), (-20_000.0, -1.0), (-1.0, 30 * 365.0)])
def test_dates_are_those_of_the_certificate(tmp_path: Path, begins: float, days: float) -> None:
    """Also beyond 2049, from when on years have four digits, and of each certificate of a file."""
    authority = Authority(tmp_path)
    own = authority.issue(begins=begins, days=days).certificate
    now = time.time()
    own.write_bytes(b"A line of text.\n" + own.read_bytes() + authority.file.read_bytes())
    found = validities_in(own)
    assert [found[0].begins, found[0].ends] == pytest.approx([now + begins * DAY, now + days * DAY], abs=60)
    assert [found[1].begins, found[1].ends] == pytest.approx([now - 9 * DAY, now + 30 * DAY], abs=60)
    assert found[0].fault() == ("has expired" if days < 0 else "is not valid yet" if begins > 0 else "")


@pytest.mark.fault(63)
def test_a_certificate_that_expires_in_mid_run_is_warned_of_before(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "gossipx")
    early, late = Validity(0.0, clock.now + 30 * DAY, Path("cert.pem")), Validity(0.0, 4e9, Path("ca.pem"))
    counts = Counters()
    dates = Reminder([late, early], counts)
    told = []
    for hours in range(32 * 24):
        for _ in range(3):
            dates.remind()
        told += [(hours - 30 * 24, record.getMessage()) for record in caplog.records]
        caplog.clear()
        clock.now += HOUR
    assert [hours for hours, _ in told] == [-14 * 24, -7 * 24, -24, -1, 0]
    assert told[0][1] == (
        "cert.pem: the certificate expires in 14 days (2027-02-14 08:00 UTC), and new connections then fail:"
        " replace the file and its key by new ones, which running peers read"
    )
    assert "expires in 24 hours" in told[2][1] and "has expired (" in told[4][1]
    assert dates.fault() == "has expired"
    assert counts["expiry_warnings"] == 5
    dates.renew([Validity(0.0, clock.now + 20 * DAY, Path("cert.pem"))])
    assert dates.fault() == ""
    dates.remind()
    assert counts["expiry_warnings"] == 5
    clock.now += 7 * DAY
    dates.remind()
    assert counts["expiry_warnings"] == 6


@pytest.mark.fault(63)
@pytest.mark.parametrize("which", ["own", "CA"])
def test_a_peer_whose_certificate_expires_soon_is_warned_as_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    caplog.set_level(logging.WARNING, "gossipx")
    authority = Authority(tmp_path, days=0.2 if which == "CA" else 30.0)
    own = authority.issue(days=0.2 if which == "own" else 30.0)
    own.transport().listen(Address("127.0.0.1", 0)).close()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(
        f"{own.certificate if which == 'own' else own.authority}: the certificate expires in 5 hours"
    )


def test_an_expired_certificate_is_left_to_the_handshake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Authority(tmp_path).issue(days=-1).transport().listen(Address("127.0.0.1", 0)).close()
    assert not caplog.records
