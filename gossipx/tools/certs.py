"""``gossipx certs new``: a private CA and one certificate per host, for users without a CA of their own."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from gossipx.errors import UsageError, how_to_install
from gossipx.launch.hosts import PeerLine, read_hosts

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise UsageError(f"creating certificates needs cryptography: {how_to_install('certs')}") from error

CA_DAYS = 3650
"""Validity of the CA, in days."""
HOST_DAYS = 730
"""Validity of a host's certificate, in days: longer than any run."""
EARLY = datetime.timedelta(days=1)
"""Time by which the validity starts before now, because clocks differ."""


def new(directory: Path, hosts: Path) -> list[str]:
    """Create ``directory`` with ``ca.pem``, ``ca.key``, and a subdirectory for each host of a hosts file.

    A host's directory contains ``cert.pem``, ``key.pem`` and a copy of ``ca.pem``. Its certificate is for the name or
    address in the hosts file, which is what other peers connect to. All lines of one host share it. Only the owner can
    read the files.

    Returns:
        Instructions for the user, one per line.

    Raises:
        UsageError: the hosts file is invalid, or the directory is not empty.
    """
    lines = read_hosts(hosts)
    first: dict[str, PeerLine] = {}
    for peer in lines:
        first.setdefault(peer.host, peer)
    folders = {folder_of(host): host for host in first}
    if len(folders) < len(first):
        raise UsageError("two host names give the same directory name: rename one of the hosts", hosts)
    files = _create([first[host] for host in folders.values()], hosts)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise UsageError("not empty, and no certificate is overwritten: give another directory", directory)
        for name, content in files.items():
            _write(directory / name, content)
    except OSError as error:
        raise UsageError(f"cannot write the certificates: {error.strerror}", directory) from error
    return [
        *(f"copy {directory / folder}/ to {host}, as gossipx-certs/" for folder, host in folders.items()),
        "then, on each: gossipx run --peers hosts.txt --bind 0.0.0.0 --tls-cert gossipx-certs/cert.pem"
        " --tls-key gossipx-certs/key.pem --tls-ca gossipx-certs/ca.pem",
        f"keep {directory / 'ca.key'} secret: it can issue certificates for peers of this run; no host needs it",
        f"the certificates are valid until {datetime.date.today() + datetime.timedelta(HOST_DAYS)}",
    ]


def folder_of(host: str) -> str:
    """Return the name of a host's directory."""
    return "host-" + re.sub(r"[^\w.-]", "-", host)


def _create(peers: Sequence[PeerLine], hosts: Path) -> dict[str, bytes]:
    """Return the contents of all files by name."""
    key = ec.generate_private_key(ec.SECP256R1())
    # The name is unique, because OpenSSL looks up a CA by its name first.
    issuer = f"gossipx CA {secrets.token_hex(4)}"
    constraints = {x509.BasicConstraints(ca=True, path_length=0): True, _usage(signs_certificates=True): True}
    authority = _signed(key, issuer, key, issuer, CA_DAYS, constraints)
    files = {"ca.pem": authority, "ca.key": _pem(key)}
    for peer in peers:
        own = ec.generate_private_key(ec.SECP256R1())
        extensions = {
            _alternative_name(peer, hosts): False,
            x509.BasicConstraints(ca=False, path_length=None): True,
            _usage(signs_certificates=False): True,
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]): False,
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()): False,
        }
        folder = folder_of(peer.host)
        files |= {
            # X.509 limits the common name to 64 characters. Peers check the alternative name instead.
            f"{folder}/cert.pem": _signed(own, peer.host[:64], key, issuer, HOST_DAYS, extensions),
            f"{folder}/key.pem": _pem(own),
            f"{folder}/ca.pem": authority,
        }
    return files


def _signed(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    by: ec.EllipticCurvePrivateKey,
    issuer: str,
    days: int,
    extensions: Mapping[x509.ExtensionType, bool],
) -> bytes:
    """Return a certificate of ``key``, signed with the key ``by``; ``extensions``: with whether each is critical."""
    now = datetime.datetime.now(datetime.timezone.utc)
    subject, signer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name, issuer))
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(signer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - EARLY).not_valid_after(now + datetime.timedelta(days=days))
    for extension, is_critical in extensions.items():
        builder = builder.add_extension(extension, is_critical)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    return bytes(builder.sign(by, hashes.SHA256()).public_bytes(Encoding.PEM))


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative_name(peer: PeerLine, hosts: Path) -> x509.SubjectAlternativeName:
    try:
        name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(peer.host.partition("%")[0]))
    except ValueError:
        try:
            name = x509.DNSName(peer.host)
        except ValueError as error:
            raise UsageError(f"no certificate can be made for '{peer.host}': {error}", hosts, peer.line) from error
    return x509.SubjectAlternativeName([name])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _write(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, from its creation on."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
