"""The secret of a run, and its file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.types import learn


class RunKey(msgspec.Struct, frozen=True, kw_only=True):
    """The secret of a run: one CURVE pair for its servers, one for its clients (Z85 text)."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def new(cls) -> RunKey:
        """Make a fresh random key."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public=server_public.decode(),
            server_secret=server_secret.decode(),
            client_public=client_public.decode(),
            client_secret=client_secret.decode(),
        )

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner can read."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(self))

    @classmethod
    def load(cls, path: Path) -> RunKey:
        """Read a key file. Raises ``PeerError`` naming the file when it holds no key."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            raise PeerError(f"{path}: no usable run key: {error}") from error


learn(globals())
