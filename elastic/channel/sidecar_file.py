"""The file by which a training script finds the sidecar that was started next to it."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.private import PRIVATE, check_private, make_private, plain_name
from holdfast.ckpt.types import learn
from holdfast.elastic.channel.shared_key import expanded
from holdfast.elastic.channel.surroundings import SIDECAR_ENV
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.processes.run_dirs import temporary_place

DOMAIN_ENV: Final = "HOLDFAST_DOMAIN"
"""Environment variable that names a node's failure domain if no option does."""

_POLL_S = 0.05


class SidecarFile(msgspec.Struct, frozen=True, kw_only=True):
    """A node's sidecar: its run, node, address and key file, and the process that runs it.

    ``domain`` names the node's failure domain; empty: the node itself.
    """

    run: str
    node: str
    domain: str
    address: str
    key_file: str
    pid: int

    def write(self, path: Path) -> None:
        """Replace the file atomically. Raises ``UnsafePathError`` in a folder of another user's."""
        if path.parent == _own_folder():
            make_private(path.parent)
        path.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        fresh.write_bytes(msgspec.json.encode(self) + b"\n")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path, *, wait_s: float = 0.0) -> SidecarFile:
        """Read the file; wait up to ``wait_s`` until it exists.

        Raises ``ConfigError`` with a remedy if there is none, or if it is another kind of file, and
        ``UnsafePathError`` in a folder that another user made.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                if path.parent == _own_folder():
                    check_private(path.parent)
                found = msgspec.json.decode(path.read_bytes(), type=cls)
                plain_name(found.run, f"{path}: the run")
                plain_name(found.node, f"{path}: the node")
                return found
            except FileNotFoundError:
                if time.monotonic() >= deadline_s:
                    raise ConfigError(
                        f"{path}: no sidecar has written this file; start one with `holdfast "
                        f"sidecar start`, or correct {SIDECAR_ENV}"
                    ) from None
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}; correct {SIDECAR_ENV}") from error
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path}: not the file of a sidecar ({error}); correct {SIDECAR_ENV}"
                ) from error
            time.sleep(_POLL_S)


def sidecar_file(given: str | Path | None, *, run: str, node: str) -> Path:
    """Return the path: the given one, that of ``HOLDFAST_SIDECAR``, or one of this user's own."""
    if named := given or os.environ.get(SIDECAR_ENV):
        return expanded(named).absolute()
    return (
        _own_folder() / f"sidecar-{plain_name(run, 'the run')}-{plain_name(node, 'the node')}.json"
    )


def _own_folder() -> Path:
    """Return the folder of this user's files if none is named; `make_private` checks it."""
    if private := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(private) / "holdfast"
    return temporary_place() / f"holdfast-{os.getuid()}"


def check_domain(name: str, source: str) -> str:
    """Return the name of a failure domain; raises ``ConfigError`` naming ``source`` if it is bad.

    Letters, digits and ``-_.:/`` are allowed, as in ``row-3/rack-7``.
    """
    if not name or not all(char.isalnum() or char in "-_.:/" for char in name):
        raise ConfigError(f"{source} {name!r}: give a name of letters, digits and -_.:/ only")
    return name


learn(globals())
