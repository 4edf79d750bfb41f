"""The file by which a training script finds the sidecar that was started beside it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.channel.surroundings import SIDECAR_ENV
from holdfast.elastic.errors import ConfigError

DOMAIN_ENV: Final = "HOLDFAST_DOMAIN"
"""Names what a node fails together with, where no option does."""

_POLL_S = 0.05


class SidecarFile(msgspec.Struct, frozen=True, kw_only=True):
    """A node's sidecar: which run and node it serves, where, by which key, kept by which process.

    ``domain`` labels what the node fails together with; empty: only with itself.
    """

    run: str
    node: str
    domain: str
    address: str
    key_file: str
    pid: int

    def write(self, path: Path) -> None:
        """Replace the file at one blow."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(self) + b"\n")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path, *, wait_s: float = 0.0) -> SidecarFile:
        """Return what the file says, waiting up to ``wait_s`` until there is one.

        Raises ``ConfigError`` saying what to do when there is none, or when it is something else.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                return msgspec.json.decode(path.read_bytes(), type=cls)
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
    """Return the file: the one given, that of ``HOLDFAST_SIDECAR``, or one of this user's own."""
    if named := given or os.environ.get(SIDECAR_ENV):
        return Path(named).expanduser().absolute()
    private = os.environ.get("XDG_RUNTIME_DIR")
    home = Path(private) if private else Path(tempfile.gettempdir())
    name = "holdfast" if private else f"holdfast-{os.getuid()}"
    return home / name / f"sidecar-{run}-{node}.json"


def check_domain(name: str, source: str) -> str:
    """Return the name of a failure domain; raises ``ConfigError`` naming ``source`` if it is bad.

    Letters, digits and ``-_.:/`` are allowed, as in ``row-3/rack-7``.
    """
    if not name or not all(char.isalnum() or char in "-_.:/" for char in name):
        raise ConfigError(f"{source} {name!r}: give a name of letters, digits and -_.:/ only")
    return name


learn(globals())
