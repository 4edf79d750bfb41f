"""The certificates of a managed etcd, which follow from the job's key.

Every launcher has the key, so every one derives the same authority from it and signs certificates
for itself. Nothing has to be handed over, and only a process with the key reads or writes in the
etcd or becomes a member. A member's certificate also bears the token of its cluster as a name.
Clients demand that name, so none can take another cluster of the same job's key for its own.
"""

from __future__ import annotations

import datetime
import functools
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.etcd.link import ClientIdentity

CA_FILE: Final = "ca.pem"
CERTIFICATE_FILE: Final = "member.pem"
KEY_FILE: Final = "member-key.pem"
_ANY: Final = "managed.holdfast"
_FIRST_DAY = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_LAST_DAY = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of the group of the curve P-256: private keys are 1 to this number less 1."""

_SEED_BYTES: Final = 48
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class Authority:
    """The authority of one job: what it signed, clients and members of its etcd trust."""

    _key: ec.EllipticCurvePrivateKey = field(repr=False)
    ca: bytes
    """Its certificate (PEM)."""

    @classmethod
    @functools.cache
    def of(cls, key: RunKey) -> Authority:
        """Return the authority of a key: the same on every machine."""
        seed = HKDF(
            algorithm=hashes.SHA256(),
            length=_SEED_BYTES,
            salt=None,
            info=b"holdfast etcd authority",
        ).derive(f"{key.server_secret}{key.client_secret}".encode())
        number = int.from_bytes(seed, "big") % (_ORDER - 1) + 1
        own = ec.derive_private_key(number, ec.SECP256R1())
        builder = _builder("holdfast", own.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        return cls(own, builder.sign(own, hashes.SHA256()).public_bytes(_PEM))

    @property
    def name(self) -> str:
        """A name that tells whether another key has the same authority, and nothing of the key."""
        raw = self._key.public_key().public_bytes(
            serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
        )
        return raw.hex()

    def client(self, token: str = "") -> ClientIdentity:
        """Return a client of the cluster of this token; without one, of any cluster of the key."""
        key, certificate = self._sign("client", ())
        return ClientIdentity(
            ca=self.ca,
            certificate=certificate,
            key=key,
            server_name=_name(token) if token else _ANY,
        )

    def write_member(self, folder: Path, *, token: str, hosts: Sequence[str]) -> None:
        """Write the files of a member of a cluster that is found at ``hosts``."""
        key, certificate = self._sign("member", (_ANY, _name(token), *hosts))
        for name, content in ((CA_FILE, self.ca), (CERTIFICATE_FILE, certificate), (KEY_FILE, key)):
            (folder / name).unlink(missing_ok=True)
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content)

    def _sign(self, subject: str, names: Sequence[str]) -> tuple[bytes, bytes]:
        """Return a new private key and its certificate."""
        own = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(subject, own.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
        )
        if names:
            found = x509.SubjectAlternativeName([_general_name(name) for name in names])
            builder = builder.add_extension(found, critical=False)
        secret = own.private_bytes(
            _PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return secret, builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def _name(token: str) -> str:
    return f"{token}.{_ANY}"


def _builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "holdfast")])
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FIRST_DAY)
        .not_valid_after(_LAST_DAY)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
