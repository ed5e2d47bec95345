"""Access control: which addresses require authentication, the secret's file, and the certificates of ``gossipx certs
new``."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import Authority

from gossipx.cli import main
from gossipx.errors import UsageError
from gossipx.figures import Counters
from gossipx.settings.sections import ExchangeSettings
from gossipx.tools import certs
from gossipx.transports import Address, tcp, tls
from gossipx.transports.access import SECRET_VARIABLE, grant, is_loopback, uncovered
from gossipx.transports.tls import Reminder, Tls, Validity, validities_in
from gossipx.wire.auth import Secrets

SECRET = "0123456789abcdef" * 4


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def secret_file(folder: Path, content: str = SECRET + "\n", mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


# --- the rule -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_nothing(bind: str) -> None:
    granted = grant(ExchangeSettings(), bind)
    assert granted.transport is tcp
    assert granted.secret is None


@pytest.mark.parametrize(
    "bind", ["0.0.0.0", "::", "192.0.2.1", "fe80::1%eth0", "no.such.name.invalid", "::ffff:1.2.3.4"]
)
def test_any_other_address_needs_a_secret_or_tls(bind: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--secret-file FILE \(or GOSSIPX_SECRET\), or --tls-cert FILE") as refused:
        grant(ExchangeSettings(), bind)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)
    assert grant(ExchangeSettings(secret_file=secret_file(tmp_path)), bind).secret is not None


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_gloo_and_nccl_off_loopback_give_a_warning_of_one_line(transport: str) -> None:
    exchange = ExchangeSettings(transport=transport, secret_file="secret")
    assert uncovered(exchange, "127.0.0.1") is None
    assert uncovered(ExchangeSettings(secret_file="secret"), "192.0.2.1") is None
    told = uncovered(exchange, "192.0.2.1")
    assert told is not None and "\n" not in told
    assert told.startswith(f"--transport {transport} has neither authentication nor encryption: models are sent in")
    assert "its MAC is checked" in told
    over_tls = uncovered(ExchangeSettings(transport=transport, tls_cert="cert"), "192.0.2.1")
    assert over_tls is not None and "its digest is sent over TLS" in over_tls


@pytest.mark.parametrize(("transport", "shares"), [("auto", True), ("shm", True), ("tcp", False), ("gloo", False)])
def test_only_some_transports_share_memory(transport: str, shares: bool) -> None:
    assert grant(ExchangeSettings(transport=transport), "127.0.0.1").share_memory is shares


def test_a_name_is_loopback_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("127.0.0.1", "192.0.2.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: found)
    assert not is_loopback("both")
    del found[1]
    assert is_loopback("both")


def test_tls_needs_all_three_files_and_excludes_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="belong together: --tls-key is missing"):
        grant(ExchangeSettings(tls_cert="a", tls_ca="b"), "127.0.0.1")
    tls = ExchangeSettings(tls_cert="a", tls_key="b", tls_ca="c")
    with pytest.raises(UsageError, match="--secret-file and --tls-cert exclude each other"):
        grant(dataclasses.replace(tls, secret_file=secret_file(tmp_path)), "127.0.0.1")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    with pytest.raises(UsageError, match="GOSSIPX_SECRET and --tls-cert exclude each other"):
        grant(tls, "127.0.0.1")


# --- the secret ---------------------------------------------------------------------------------


OLD, NEW = "the old secret of the run", "the new secret of the run"


def secrets_of(file: str | None) -> Secrets:
    """Return the secrets of a file, else of the environment."""
    granted = grant(ExchangeSettings(secret_file=file), "0.0.0.0").secret
    assert granted is not None
    return granted


def values(secrets: Secrets) -> list[str]:
    return [secret.value.decode() for secret in secrets.valid()]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_secret_is_the_file_without_the_end_of_its_line(mark: str, end: str, tmp_path: Path) -> None:
    """Nor the byte order mark of a Windows editor: the same secret of another machine has none."""
    secrets = secrets_of(secret_file(tmp_path, mark + SECRET + end))
    assert values(secrets) == [SECRET] and SECRET not in repr(secrets)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "0 bytes"),
        (b"123456789012345\n", "15 bytes, which could be guessed; at least 16"),
        (b"a" * 5000, "another file"),
        (SECRET.encode("utf-16"), "is UTF-16 text: save it as UTF-8"),  # as PowerShell writes it
    ],
    ids=["empty", "short", "long", "UTF-16"],
)
def test_an_invalid_secret_is_refused_and_not_shown(content: bytes, told: str, tmp_path: Path) -> None:
    file = secret_file(tmp_path)
    Path(file).write_bytes(content)
    with pytest.raises(UsageError, match=told) as refused:
        secrets_of(file)
    assert str(refused.value).startswith(f"{file}: --secret-file")
    assert not content or content.strip().decode(errors="replace") not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "found"),
    [("sixteen bytes of it", ["sixteen bytes of it"]), ("\ufeff" + SECRET, [SECRET]), (f"{NEW}\n{OLD}\n", [NEW, OLD])],
    ids=["one", "with a byte order mark", "two"],
)
def test_secrets_of_the_environment_are_overridden_by_the_file(
    content: str, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file: ``GOSSIPX_SECRET=$(cat secret)``."""
    monkeypatch.setenv(SECRET_VARIABLE, content)
    assert values(secrets_of(None)) == found
    assert values(secrets_of(secret_file(tmp_path, OLD))) == [OLD]
    monkeypatch.setenv(SECRET_VARIABLE, "hunter2")
    with pytest.raises(UsageError, match="GOSSIPX_SECRET holds 7 bytes") as refused:
        secrets_of(None)
    assert "hunter2" not in str(refused.value)


def test_the_lines_of_a_secret_file_are_followed_while_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = secrets_of(secret_file(tmp_path, OLD))
    assert values(secrets) == [OLD]
    for content in (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", NEW):
        secret_file(tmp_path, content)
        assert values(secrets) == content.split("\n")[:2][: 2 if OLD in content else 1]
    assert not caplog.records


def replace_by_nothing(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (replace_by_nothing, "holds 0 bytes"),
        (Path.unlink, "cannot read --secret-file: No such file"),
        (lambda file: file.write_text(f"{OLD}\nshort\n"), "holds 5 bytes on a line"),
        (lambda file: file.write_text(f"{OLD}\n{NEW}\n{SECRET}\n"), "has 3 lines: one secret per line, and at most 2"),
        (lambda file: file.chmod(0o644), "others can read --secret-file"),
    ],
)
def test_a_secret_file_that_is_spoilt_in_mid_run_keeps_the_old_secrets_and_says_so_once(
    spoil: Callable[[Path], object], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = Path(secret_file(tmp_path, OLD))
    secrets = secrets_of(str(file))
    spoil(file)
    assert [values(secrets) for _ in range(3)] == [[OLD]] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert told in line and line.endswith("; the secrets that it had before stay valid") and "\n" not in line
    assert OLD not in line and NEW not in line
    file.unlink(missing_ok=True)
    secret_file(tmp_path, NEW)
    assert values(secrets) == [NEW]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_secret_that_others_can_read_is_refused_with_the_command_to_fix_it(mode: int, tmp_path: Path) -> None:
    file = secret_file(tmp_path, mode=mode)
    with pytest.raises(UsageError, match=f"others can read --secret-file: chmod 600 {file}$"):
        secrets_of(file)


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, told in (
        ("none", "cannot read --secret-file: No such file"),
        ("", "not a regular"),
        ("pipe", "not a regular"),
    ):
        with pytest.raises(UsageError, match=told):
            secrets_of(str(tmp_path / name))


# --- TLS files ----------------------------------------------------------------------------------


def test_invalid_tls_files_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    good, other = authority.issue(), authority.issue()
    nothing, junk = tmp_path / "none", tmp_path / "junk"
    junk.write_text("junk")
    junk.chmod(0o600)

    valid = {"tls_cert": str(good.certificate), "tls_key": str(good.key), "tls_ca": str(good.authority)}

    def refused(**files: Path) -> str:
        with pytest.raises(UsageError) as told:
            grant(ExchangeSettings(**valid | {name: str(file) for name, file in files.items()}), "127.0.0.1")
        assert "\n" not in str(told.value)
        return str(told.value)

    assert isinstance(grant(ExchangeSettings(**valid), "::").transport, Tls)
    for option in ("cert", "key", "ca"):
        told = f"{nothing}: cannot read --tls-{option}: No such file or directory"
        assert refused(**{f"tls_{option}": nothing}) == told
    assert f"{junk}: --tls-ca is not a CA's certificate" in refused(tls_ca=junk)
    assert f"{junk}: --tls-cert is not a certificate" in refused(tls_cert=junk)
    assert f"{junk}: --tls-key is not the private key of {good.certificate}" in refused(tls_key=junk)
    told = f"--tls-key is not the private key of {good.certificate} as PEM (key values mismatch)"
    assert told in refused(tls_key=other.key)
    good.key.chmod(0o644)
    assert refused() == f"{good.key}: others can read --tls-key: chmod 600 {good.key}"


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(tmp_path: Path) -> None:
    good = Authority(tmp_path).issue()
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(good.key.read_bytes(), None)
    locked = pem.BestAvailableEncryption(b"word")
    good.key.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, locked))
    with pytest.raises(UsageError, match="has a passphrase"):
        good.transport()


# --- gossipx certs new --------------------------------------------------------------------------


def made(folder: Path, hosts: str) -> Path:
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    file = folder / "hosts.txt"
    file.write_text(hosts)
    certs.new(folder / "certs", file)
    return folder / "certs"


def test_hosts_connect_with_their_certificates(tmp_path: Path) -> None:
    directory = made(tmp_path, "localhost slots=2 name=ada\n127.0.0.1:7000\n[::1]:7000\nlocalhost:9000\n")
    folders = sorted(path.name for path in directory.iterdir())
    assert folders == ["ca.key", "ca.pem", "host---1", "host-127.0.0.1", "host-localhost"]
    own, other = (
        Tls(directory / host / "cert.pem", directory / host / "key.pem", directory / host / "ca.pem")
        for host in ("host-127.0.0.1", "host-localhost")
    )
    by = time.monotonic() + 60
    listening = own.listen(Address("127.0.0.1", 0))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(other.connect, listening.address, by)
        theirs = listening.accept()
        theirs.shake_hands(by)
        ours = connecting.result()
    assert (theirs.speaks_for("localhost"), theirs.speaks_for("127.0.0.1")) == (True, False)
    assert (ours.speaks_for("localhost"), ours.speaks_for("127.0.0.1")) == (False, True)
    for each in (ours, theirs):
        each.abort()
    listening.close()


def test_created_files_are_readable_by_their_owner_only_and_not_overwritten(tmp_path: Path) -> None:
    directory = made(tmp_path, "ada\nbob\n")
    for path in [directory, *directory.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    before = (directory / "ca.pem").read_bytes()
    with pytest.raises(UsageError, match="no certificate is overwritten"):
        certs.new(directory, tmp_path / "hosts.txt")
    assert (directory / "ca.pem").read_bytes() == before


def test_hosts_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    for host in ("../../ada", "..", "/etc/ada"):
        with pytest.raises(UsageError, match=r"hosts\.txt:1: '.+' is not (a host name|host\[:port\])"):
            made(tmp_path, f"{host}\n")
    assert certs.folder_of("fd00::7/../ada") == "host-fd00--7-..-ada"
    with pytest.raises(UsageError, match="two host names give the same directory name"):
        made(tmp_path, "a;b\na$b\n")


def test_a_host_that_no_certificate_can_name_is_reported_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"hosts\.txt:2: no certificate can be made for 'bü"):
        made(tmp_path, "ada\nbücher\n")
    assert not (tmp_path / "certs").exists()


def test_without_the_package_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "gossipx.tools.certs")
    monkeypatch.delattr("gossipx.tools.certs")
    (tmp_path / "hosts.txt").write_text("ada\n")
    with pytest.raises(SystemExit) as ended:
        main(["certs", "new", str(tmp_path / "certs"), str(tmp_path / "hosts.txt")])
    assert ended.value.code == 2
    told = "creating certificates needs cryptography: pip install '.[certs]' in your clone of gossipx\n"
    assert capsys.readouterr().err == told


# --- The dates of certificates: what is read from a file, and when a peer warns. The clock is simulated


HOUR, DAY = 3600.0, 86400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(now=1_800_000_000.0, time=lambda: made.now, monotonic=time.monotonic)
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
    clock: Any, caplog: pytest.LogCaptureFixture
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
    file = own.certificate if which == "own" else own.authority
    assert told.startswith(f"{file}: the certificate expires in 5 hours")


def test_an_expired_certificate_is_left_to_the_handshake(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Authority(tmp_path).issue(days=-1).transport().listen(Address("127.0.0.1", 0)).close()
    assert not caplog.records
