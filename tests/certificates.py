"""Certificates for tests, valid and invalid ones."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gossipx.transports.tls import Tls


@dataclass(frozen=True)
class Identity:
    """PEM files: a certificate, its key, and the CA that its owner trusts."""

    certificate: Path
    key: Path
    authority: Path

    def transport(self) -> Tls:
        return Tls(self.certificate, self.key, self.authority)

    def options(self) -> list[str | Path]:
        return ["--tls-cert", self.certificate, "--tls-key", self.key, "--tls-ca", self.authority]


class Authority:
    """A CA whose files are in ``folder``, valid for ``days``. Skips the test if ``cryptography`` is not installed."""

    def __init__(self, folder: Path, name: str = "tests' CA", days: float = 30):
        pytest.importorskip("cryptography", reason="certificates are made with the package cryptography")
        from cryptography.hazmat.primitives.asymmetric import ec

        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issued = 0
        self.file = self._write("ca.pem", self._sign(name, self._key.public_key(), days=days))

    def issue(
        self,
        host: str = "127.0.0.1",
        *,
        days: float = 30,
        begins: float = -9,
        uses: tuple[str, ...] = ("server", "client"),
        alternative: bool = True,
    ) -> Identity:
        """Issue a certificate for ``host``, valid for ``days``; negative: expired.

        Args:
            begins: the day from now on which it becomes valid; positive: not valid yet.
            alternative: whether the host is a subject alternative name, not only the common name.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        own = ec.generate_private_key(ec.SECP256R1())
        self._issued += 1
        form, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        names = [alternative_name(host)] if alternative else []
        certificate = self._sign(host, own.public_key(), days=days, begins=begins, uses=uses, alternatives=names)
        return Identity(
            self._write(f"{self._issued}.pem", certificate),
            self._write(f"{self._issued}.key", own.private_bytes(serialization.Encoding.PEM, form, none)),
            self.file,
        )

    def _sign(
        self, host: str, key: Any, *, days: float, begins: float = -9, uses: Sequence[str] = (), alternatives: Any = ()
    ) -> bytes:
        """Sign a certificate for the given uses; without any it is that of a CA."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def named(text: str) -> Any:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(named(host)).issuer_name(named(self._name)).public_key(key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + datetime.timedelta(begins))
        builder = builder.not_valid_after(now + datetime.timedelta(days))
        builder = builder.add_extension(x509.BasicConstraints(ca=not uses, path_length=None), critical=True)
        if alternatives:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        if uses:
            both = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
            builder = builder.add_extension(x509.ExtendedKeyUsage([both[use] for use in uses]), critical=False)
        return bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _write(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return path


def alternative_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
