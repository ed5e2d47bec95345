"""Secrets and certificates that are replaced while peers connect, over real connections."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import managers
from certificates import Authority, Identity
from managers import LONG, Heard, Host, Run, failure

from gossipx.errors import NotAuthorisedError
from gossipx.protocol.messages import HereReply, LeaveRequest, Stage
from gossipx.transports.access import SecretFile
from gossipx.wire.auth import FixedSecrets, Secret

start, heard = managers.start, managers.heard
Start = Callable[[int], Run]


def hang_up(host: Host, to: int) -> None:
    """Close idle connections, so that the next request opens a new one."""
    for link in host.comm._member.links._idle[to]:
        link.stream.abort()


def both_connect(run: Run) -> None:
    for one, other in ((0, 1), (1, 0)):
        hang_up(run.hosts[one], other)
        assert run.hosts[one].ask(other, LeaveRequest()).get(timeout=LONG) == HereReply(Stage.TRAIN)


def test_a_secret_is_rotated_while_peers_connect(start: Start, tmp_path: Path) -> None:
    """By the commands of docs/security.md, one machine after the other; every connection between is new."""
    run, files = start(2), [tmp_path / "secret-0", tmp_path / "secret-1"]
    new = tmp_path / "new"
    new.write_text("the new secret of this run\n")
    for file in files:
        file.touch(0o600)
        file.write_text("the old secret of this run\n")
    a, b = (run.host(rank, secret=SecretFile(file)) for rank, file in enumerate(files))
    a.serve(b"")
    b.serve(b"")
    both_connect(run)
    for command in ("cat new >> {}", "cat new > {}"):
        for file in files:
            subprocess.run(command.format(file), shell=True, check=True, cwd=tmp_path)
            both_connect(run)
    assert files[0].read_text() == new.read_text()
    assert a.comm.counts["strangers"] == b.comm.counts["strangers"] == 0
    stale = run.host(1, secret=FixedSecrets((Secret(b"the old secret of this run"),)))
    assert isinstance(failure(stale, 0), NotAuthorisedError)


def copied(identity: Identity, folder: Path) -> Identity:
    folder.mkdir()
    own = Identity(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    shutil.copy(identity.certificate, own.certificate)
    shutil.copy(identity.key, own.key)
    shutil.copy(identity.authority, own.authority)
    return own


def test_certificates_are_replaced_while_peers_connect(start: Start, heard: Heard, tmp_path: Path) -> None:
    """A second CA is trusted first; then its certificates replace those of the first, and then the first CA goes."""
    old, new, run = Authority(tmp_path / "old"), Authority(tmp_path / "new", "another CA"), start(2)
    own = [copied(old.issue(), tmp_path / f"host-{number}") for number in range(2)]
    a, b = (run.host(rank, transport=identity.transport()) for rank, identity in enumerate(own))
    a.serve(b"")
    b.serve(b"")
    both_connect(run)
    for identity in own:
        identity.authority.write_bytes(old.file.read_bytes() + new.file.read_bytes())
        both_connect(run)
    for identity in own:
        issued = new.issue()
        shutil.copy(issued.certificate, identity.certificate)
        both_connect(run)  # the certificate's key is still missing, so the old pair stays in use
        assert "is not the private key of" in heard.wait("what was read before stays in use").getMessage()
        shutil.copy(issued.key, identity.key)
        both_connect(run)
    for identity in own:
        shutil.copy(new.file, identity.authority)
        both_connect(run)
    assert a.comm.counts["strangers"] == b.comm.counts["strangers"] == 0
    stale = run.host(1, transport=dataclasses.replace(old.issue(), authority=new.file).transport())
    assert isinstance(failure(stale, 0), NotAuthorisedError)
