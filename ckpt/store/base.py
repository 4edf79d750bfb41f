"""What a checkpoint needs of the place it is kept in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from typing_extensions import Buffer, TypeIs


class Readable(Protocol):
    """An open file of the store; reads of several threads do not disturb each other."""

    nbytes: int
    run_bytes: int
    """What is best read at a time: little where a read costs little, so that caches are warm."""

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` one after the other from offset ``at``; return the bytes read.

        Less than asked means that the file ends there.
        """

    def close(self) -> None:
        """Release the file."""


class Poured(Protocol):
    """Bytes that copy themselves where they are wanted, in order and once.

    Only for a store that copies what it is given (`holdfast.ckpt.store.local.DirectStore`): others
    write from where the bytes are.
    """

    nbytes: int

    def pour(self, target: int, nbytes: int) -> None:
        """Copy the next ``nbytes`` to the address ``target``."""


Part: TypeAlias = Buffer | Poured


def is_poured(part: Part) -> TypeIs[Poured]:
    """Say whether a part copies itself."""
    return hasattr(part, "pour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpublished:
    """What a writer began and did not publish, ``where`` people find it.

    ``abandoned``: its writer is known to be gone, so that a sweep of the folder would remove it.
    """

    where: str
    abandoned: bool


class Store(Protocol):
    """Named files below one root. Names are relative, with slashes.

    Every implementation publishes whole files only: a name shows the old bytes or the new ones,
    durably, whatever happens in between. Errors: ``NotFoundError`` for a name that is not there,
    ``StoreError`` when the place refuses (full, read-only, forbidden), ``CorruptError`` when it
    cannot give back what it took.
    """

    root: str

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted; none if it is absent."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None when it is not there."""

    def read(self, name: str) -> bytes:
        """Return a small file's bytes."""

    def open(self, name: str) -> Readable:
        """Open a file for ranged reads."""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file from ``parts``, replacing what was there; return its size in bytes.

        A part must not change before the call returns.
        """

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a small file's bytes and the version they are, for `replace`."""

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Publish a small file if it still is what ``expected`` says; say whether it was done.

        ``expected`` is a version that `fetch` returned, None for a file that is not to be there
        yet. Of several that race with the same expectation one wins.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are passed over."""

    def remove(self, folder: str) -> None:
        """Remove a folder in which no file is left; one that holds a file stays as it is."""

    def sweep(self, folder: str) -> None:
        """Remove what killed writers left directly below a folder."""

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return what was begun directly below a folder and is not published; removes nothing."""

    def where(self, name: str) -> str:
        """Return the name as people and tools outside find it."""
