"""The security files of etcd in tests: an authority, certificates for members and clients."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of one authority; made anew by `make`."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Write an authority, and certificates of a server and of a client that it signed."""
        folder.mkdir(parents=True, exist_ok=True)
        made = cls(folder)
        key, authority = made._write("ca", signed_by=None)
        for name in ("server", "client"):
            made._write(name, signed_by=(key, authority))
        return made

    @property
    def query(self) -> str:
        """Return the options of an address that make a client use them."""
        return "&".join(f"{option}={self.file(name)}" for option, name in _CLIENT_FILES)

    @property
    def server_options(self) -> dict[str, str]:
        """Return etcd's options that make a member use them and ask clients for theirs."""
        return {
            "cert-file": self.file("server.crt"),
            "key-file": self.file("server.key"),
            "trusted-ca-file": self.file("ca.crt"),
            "client-cert-auth": "true",
        }

    def file(self, name: str) -> str:
        """Return the path of one of the files."""
        return str(self.folder / name)

    def context(self) -> ssl.SSLContext:
        """Return what a client of the standard library needs."""
        context = ssl.create_default_context(cafile=self.file("ca.crt"))
        context.load_cert_chain(self.file("client.crt"), self.file("client.key"))
        return context

    def _write(self, name: str, *, signed_by: tuple[Any, Any] | None) -> tuple[Any, Any]:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {uuid.uuid4().hex}")])
        signing_key, issuer = (signed_by[0], signed_by[1].subject) if signed_by else (key, subject)
        now = datetime.datetime.now(datetime.UTC)
        names = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(ca=not signed_by, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(signing_key, hashes.SHA256())
        )
        encoding = serialization.Encoding.PEM
        secret = key.private_bytes(
            encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        Path(self.file(f"{name}.key")).write_bytes(secret)
        Path(self.file(f"{name}.crt")).write_bytes(certificate.public_bytes(encoding))
        return key, certificate


_CLIENT_FILES = (("ca", "ca.crt"), ("cert", "client.crt"), ("key", "client.key"))
