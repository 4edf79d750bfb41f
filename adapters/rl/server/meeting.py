"""The directory through which a training loop and its sampling processes find each other.

The loop's rank 0 writes its offer (`Offer`) and the run's key into it. Each side holds a file lock
there while it lives; the kernel releases the lock when the process ends in any way, and the other
side sees it. Locks are POSIX record locks: a forked child does not have them. For several machines
the directory must be on a shared file system with locks.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from holdfast.adapters.rl.ledger.plan import BatchPlan
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import RunKey
from holdfast.ckpt.types import learn
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import GenerationRecord

_OFFER: Final = "offer.json"
_KEY: Final = "key.json"
_LEADER: Final = "leader.lock"
_SAMPLERS: Final = "samplers"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of rank 0 of ``generation`` to samplers, at the address ``leader``.

    ``seed`` is that of the noise, ``names`` are the model's parameters, ``policies`` the names of
    those that speak, if there are several. ``over``: no more work.
    For runs that train one policy each, ``reached`` is the newest version that can be read,
    ``keeps`` the lowest step that the run may train again, and ``frozen`` the digest of all frozen
    weights, None if there are none.
    """

    run: str
    seed: int
    plan: BatchPlan
    names: tuple[str, ...]
    generation: GenerationRecord
    leader: str
    over: bool = False
    policies: tuple[str, ...] = ()
    reached: int = -1
    keeps: int = 0
    frozen: str | None = None


class Lock:
    """Holds the lock of a file from now until it is released, or the process ends.

    The file has ``content``.
    """

    def __init__(self, path: Path, content: bytes = b"") -> None:
        self._path = path
        draft = _draft(path)
        self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, content)
        draft.replace(path)  # so the file is never visible without its lock

    def release(self) -> None:
        """Release the lock; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_held(path: Path) -> bool:
    """Say whether another process holds the lock of a file; False if there is no file."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(fd)


class Meeting:
    """The meeting directory, with the operations of both sides."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._seen: tuple[tuple[int, int], Offer] | None = None

    # -- the loop's side -------------------------------------------------------------------------

    def lead(self, key: RunKey) -> Lock:
        """Create the directory, put the key into it, and hold the leader's lock.

        Raises ``ConfigError`` if the directory is not writable.
        """
        try:
            (self._directory / _SAMPLERS).mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._directory / _OFFER).unlink(missing_ok=True)  # a former leader's
            lock = Lock(self._directory / _LEADER)
            draft = _draft(self._directory / _KEY)
            key.save(draft)
            draft.replace(self._directory / _KEY)
        except OSError as error:
            raise ConfigError(
                f"{self._directory}: {error.strerror}; give serve() a directory that can be written"
            ) from error
        return lock

    def write(self, offer: Offer) -> None:
        """Replace the offer atomically."""
        path = self._directory / _OFFER
        draft = _draft(path)
        draft.write_bytes(msgspec.json.encode(offer))
        draft.replace(path)

    def end(self) -> None:
        """Mark the offer, if there is one, as over."""
        offer = self.offer()
        if offer is not None and not offer.over:
            self.write(msgspec.structs.replace(offer, over=True))

    def alive(self) -> set[str]:
        """Return the incarnations of the living samplers; delete the files of the others."""
        found: set[str] = set()
        for path in (self._directory / _SAMPLERS).iterdir():
            if path.name.startswith("."):
                continue
            if is_held(path):
                found.add(path.name)
            else:
                path.unlink(missing_ok=True)
        return found

    # -- a sampler's side ------------------------------------------------------------------------

    def join(self, incarnation: str) -> Lock:
        """Hold a sampler's lock."""
        return Lock(self._directory / _SAMPLERS / incarnation)

    def key(self) -> RunKey:
        """Return the run's key."""
        return RunKey.load(self._directory / _KEY)

    def led(self) -> bool:
        """Say whether a leader lives."""
        return is_held(self._directory / _LEADER)

    def offer(self) -> Offer | None:
        """Return the newest offer; None if there is none yet."""
        with suppress(FileNotFoundError):
            path = self._directory / _OFFER
            found = path.stat()
            at = (found.st_ino, found.st_mtime_ns)
            if self._seen is None or self._seen[0] != at:
                try:
                    self._seen = (at, msgspec.json.decode(path.read_bytes(), type=Offer))
                except msgspec.MsgspecError as error:
                    raise PeerError(f"{path}: no offer of this version: {error}") from error
        return self._seen[1] if self._seen else None


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


learn(globals())
