"""The certificates of a managed etcd follow from the job's key and admit nobody without it."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from holdfast.ckpt.transport import RunKey
from holdfast.elastic.coordinator.etcd.link import ClientIdentity
from holdfast.elastic.coordinator.managed.authority import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    Authority,
)

KEY = RunKey.new()


def copy_of(key: RunKey) -> RunKey:
    return RunKey(
        server_public=key.server_public,
        server_secret=key.server_secret,
        client_public=key.client_public,
        client_secret=key.client_secret,
    )


def shake_hands(folder: Path, identity: ClientIdentity) -> str:
    """Return the error of a handshake of a client with a member, empty if there is none."""
    (folder / "c.pem").write_bytes(identity.certificate)
    (folder / "k.pem").write_bytes(identity.key)
    client = ssl.create_default_context(cadata=identity.ca.decode())
    client.load_cert_chain(folder / "c.pem", folder / "k.pem")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / CA_FILE)
    server.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    server.verify_mode = ssl.CERT_REQUIRED
    near, far = socket.socketpair()
    failed: list[str] = []

    def serve() -> None:
        try:
            with server.wrap_socket(far, server_side=True) as end:
                end.send(b"x")
        except OSError as error:
            failed.append(str(error))
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(near, server_hostname=identity.server_name) as end:
            if end.recv(1) != b"x":
                failed.append("no answer")
    except OSError as error:
        failed.append(str(error))
        near.close()
    thread.join()
    return "; ".join(failed)


def test_every_machine_derives_the_same_authority(tmp_path: Path) -> None:
    Authority.of(KEY).write_member(tmp_path, token="t1", hosts=["10.0.0.1", "head"])
    assert shake_hands(tmp_path, Authority.of(copy_of(KEY)).client("t1")) == ""
    assert shake_hands(tmp_path, Authority.of(KEY).client()) == ""


def test_another_key_is_a_stranger_on_both_sides(tmp_path: Path) -> None:
    Authority.of(KEY).write_member(tmp_path, token="t1", hosts=["10.0.0.1"])
    stranger, ours = Authority.of(RunKey.new()).client("t1"), Authority.of(KEY).client("t1")
    assert "verify failed" in shake_hands(tmp_path, stranger)
    trusting = ClientIdentity(
        ca=ours.ca, certificate=stranger.certificate, key=stranger.key, server_name="t1"
    )
    assert shake_hands(tmp_path, trusting)
    assert Authority.of(KEY).name != Authority.of(RunKey.new()).name


def test_a_client_of_one_cluster_refuses_another_of_the_same_key(tmp_path: Path) -> None:
    Authority.of(KEY).write_member(tmp_path, token="t2", hosts=["10.0.0.1"])
    assert "mismatch" in shake_hands(tmp_path, Authority.of(KEY).client("t1"))


def test_the_files_are_private_and_name_the_hosts(tmp_path: Path) -> None:
    authority = Authority.of(KEY)
    for _ in range(2):  # again over the files of an earlier start
        authority.write_member(tmp_path, token="t", hosts=["10.0.0.1", "127.0.0.1", "head"])
    for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    certificate = x509.load_pem_x509_certificate((tmp_path / CERTIFICATE_FILE).read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address("10.0.0.1"),
        ipaddress.ip_address("127.0.0.1"),
    ]
    assert "head" in names.get_values_for_type(x509.DNSName)


def test_no_secret_shows_in_what_is_printed() -> None:
    authority = Authority.of(KEY)
    assert "PRIVATE" not in repr(authority) + repr(authority.client("t"))


@pytest.mark.parametrize("token", ["", "t"])
def test_clients_demand_the_name_of_their_cluster(token: str) -> None:
    assert Authority.of(KEY).client(token).server_name.endswith("managed.holdfast")
