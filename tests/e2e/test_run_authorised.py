"""``gossipx run`` with a secret or certificates: several on one machine, each with a loopback address of its own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Authority, Identity
from ports import address, free_ports
from seeds import some

from runs import TEN_LINES, Ended, Folder, Process, Run, differences, folder, one_line

WITH_SCRIPT = ("--peer-timeout", "10", "--policy", "tau:5")
BRIEF = ("--iterations", "30", "--batch-size", "8", "--eval-interval", "0", *WITH_SCRIPT)
SECRET, WRONG = "the secret of this run, which is long", "another secret, of somebody else"
NEXT = "the next secret of this run, as long"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is loopback on Linux alone")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Folder]:
    """A folder whose three peers are three hosts."""
    with folder(tmp_path, 1) as here:
        here.names = [f"{address(host)}:{port}" for host, port in enumerate(free_ports(3), 1)]
        here.hosts.write_text("".join(f"{name}\n" for name in here.names))
        yield here


def secret(here: Folder, name: str, value: str) -> Path:
    path = here.path / name
    path.write_text(value + "\n")
    path.chmod(0o600)
    return path


def start(here: Folder, host: int, *options: str | Path) -> Process:
    """Start ``gossipx run`` as on one of the hosts, from 1."""
    brief = WITH_SCRIPT if any(isinstance(option, Path) and option.suffix == ".py" for option in options) else BRIEF
    return here.start_run(*brief, "--advertise", address(host), *options, name=f"host{host}")


def agreed(here: Folder, ended: dict[int, Ended]) -> None:
    models = []
    for host, end in ended.items():
        assert end.code == 0, end.shown
        assert "Traceback" not in end.output + end.errors, end.shown
        models.append(Run(here.path / f"host{host}", end).model(host - 1))
    for model in models[1:]:
        assert max(differences(models[0], model).values()) <= 1e-6


@pytest.mark.slow
@pytest.mark.fault(18)
def test_the_one_with_the_wrong_secret_ends_by_exit_code_5_and_the_others_train(place: Folder) -> None:
    good, bad = secret(place, "good", SECRET), secret(place, "bad", WRONG)
    runs = {host: start(place, host, "--secret-file", good) for host in (1, 2)}
    for run in runs.values():
        run.line("joining")
    wrong = start(place, 3, "--secret-file", bad).end()
    told = one_line(wrong, 5)
    assert "not authorised: the secrets differ; give every peer of the run the same secret" in told
    ended = {host: run.end() for host, run in runs.items()}
    agreed(place, ended)
    assert any(any(Run(place.path / f"host{host}", end).summary["strangers"]) for host, end in ended.items())
    assert any("not authorised: the secrets differ" in end.output for end in ended.values()), ended[1].shown
    files = [
        file.read_bytes() for host in (1, 2, 3) for file in (place.path / f"host{host}").rglob("*") if file.is_file()
    ]
    assert len(files) > 4
    shown = [end.output + end.errors for end in (*ended.values(), wrong)]
    for value in (SECRET, WRONG):
        assert not any(value.encode() in content for content in files)
        assert not any(value in text for text in shown)


def test_a_peer_with_the_next_secret_joins_a_run_that_began_with_the_last_one(place: Folder) -> None:
    """The peers that train get the new secret, and lose the old one, as docs/security.md says, without a restart.

    No time passes here between the steps, so a handshake under way may still fail; in test_authorised none does.
    """
    script = place.script(
        TEN_LINES
        + """
with peer:
    print("trains", flush=True)
    while not all_have(peer, "mixed", peer._role.sync.retrievals > 0, range(3)):
        train(peer, model, optimizer, peer.iteration + 20)
"""
    )
    owned = {host: secret(place, f"secret-{host}", SECRET) for host in (1, 2)}
    new = secret(place, "new", NEXT)
    options = ("--peer-timeout", "5", script, place.path)
    runs = {host: start(place, host, "--secret-file", file, *options) for host, file in owned.items()}
    for run in runs.values():
        run.line("trains")
    for file in owned.values():
        file.write_text(file.read_text() + new.read_text())
    for file in owned.values():
        file.write_text(new.read_text())
    runs[3] = start(place, 3, "--secret-file", new, *options)
    ended = {host: run.end() for host, run in runs.items()}
    agreed(place, ended)
    for end in ended.values():
        assert SECRET not in end.output + end.errors and NEXT not in end.output + end.errors


def certified(here: Folder, what: str) -> tuple[Identity, Identity, str]:
    """Certificates of two hosts, of which the second is invalid, and the expected message."""
    authority = Authority(here.path / "ca")
    good = authority.issue(address())
    if what == "expired":
        return good, authority.issue(address(2), days=-1), "says that the certificate of this peer has expired"
    if what == "another host's":
        return good, authority.issue(address(9)), f"is not for '{address(2)}', its host in the hosts file"
    foreign = Authority(here.path / "foreign", "somebody's CA").issue(address(2))
    return good, dataclasses.replace(foreign, authority=good.authority), "does not know the CA that signed"


@pytest.mark.parametrize("what", some(["expired", "another host's", "foreign"], "another host's"))
@pytest.mark.fault(20)
def test_a_bad_certificate_ends_a_peer_by_exit_code_5(place: Folder, what: str) -> None:
    good, bad, told = certified(place, what)
    place.hosts.write_text("".join(f"{name}\n" for name in place.names[:2]))
    first = start(place, 1, *good.options())
    first.line("joining")
    assert told in one_line(start(place, 2, *bad.options()).end(), 5)
    assert first.line(r"not authorised: the certificate of 127\.")


def test_certificates_made_by_gossipx_are_all_that_is_needed(place: Folder) -> None:
    pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
    place.hosts.write_text("".join(f"{name}\n" for name in place.names[:2]))
    made = place.start("-m", "gossipx", "certs", "new", "certs", place.hosts).end()
    assert made.code == 0, made.shown
    assert f"copy certs/host-{address(2)}/ to {address(2)}" in made.output
    runs = {}
    for host in (1, 2):
        own = place.path / "certs" / f"host-{address(host)}"
        files = Identity(own / "cert.pem", own / "key.pem", own / "ca.pem")
        runs[host] = start(place, host, *files.options())
    agreed(place, {host: run.end() for host, run in runs.items()})
