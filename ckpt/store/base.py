"""The interface of the stores that keep checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from typing_extensions import Buffer, TypeIs

from holdfast.ckpt.native.checked_read import Pieces, pieces_kernel
from holdfast.ckpt.native.sums import Sums

SMALL_FILE_BYTES: Final = 1 << 30
"""The most bytes of a file that is read in one piece. Ours hold far less: a manifest of a million
tensors has 100 MiB."""


class Readable(Protocol):
    """An open file of the store; reads of several threads do not disturb each other."""

    nbytes: int
    run_bytes: int
    """The best size of a read: small where reads cost little, so that bytes stay in the cache."""

    def read_into(self, buffers: Sequence[Buffer], at: int) -> int:
        """Fill ``buffers`` one after the other from offset ``at``; return the bytes read.

        A smaller result than requested means that the file ends there.
        """

    def close(self) -> None:
        """Release the file."""


class SummingFile(Readable, Protocol):
    """A file that computes checksums of the bytes that it reads, as fast as it reads them."""

    def read_checked(self, into: memoryview, at: int) -> tuple[int, list[int]]:
        """Fill ``into`` from offset ``at``; return the bytes read, and the CRC32C of their blocks.

        A block has ``crc.BLOCK_BYTES``; the last one may be shorter.
        """


def is_summing(file: Readable) -> TypeIs[SummingFile]:
    """Say whether a file checksums what it reads."""
    return hasattr(file, "read_checked")


class PieceFile(Readable, Protocol):
    """A file of which many pieces can be read in one call."""

    def read_pieces(self, pieces: Pieces) -> tuple[Sums, int, int]:
        """Read pieces into memory that the caller keeps alive.

        Returns what `holdfast.ckpt.native.checked_read.read_pieces` does.
        """


def reads_pieces(file: Readable) -> TypeIs[PieceFile]:
    """Say whether many pieces of a file can be read in one call."""
    return pieces_kernel() is not None and hasattr(file, "read_pieces")


class Poured(Protocol):
    """Bytes that copy themselves to their destination, in order and once.

    Only a store that copies its parts takes them (`holdfast.ckpt.store.local.DirectStore`): others
    write directly from the parts' memory.
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
    """A file that a writer began and did not publish; ``where`` is its path or URL.

    ``abandoned``: its writer is known to be gone, so that a sweep of the folder would remove it.
    """

    where: str
    abandoned: bool


class Store(Protocol):
    """Named files below one root. Names are relative, with slashes.

    Every implementation publishes whole files only: a name shows the old bytes or the new ones,
    durably, whatever happens in between. Errors: ``NotFoundError`` for a missing name,
    ``StoreError`` when the store refuses (full, read-only, forbidden), ``CorruptError`` when it
    cannot return the stored bytes.
    """

    root: str

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below the folder ``prefix``, sorted; none if it is absent."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None when it does not exist."""

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """Return a small file's bytes.

        Raises ``CorruptError``, before it reads them, if there are more than ``most_bytes``.
        """

    def open(self, name: str) -> Readable:
        """Open a file for ranged reads."""

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file from ``parts``, replacing any old one; return its size in bytes.

        A part must not change before the call returns.
        """

    def fetch(self, name: str) -> tuple[bytes, str]:
        """Return a small file's bytes and their version, for `replace`."""

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Publish a small file if its version is still ``expected``; say whether it was published.

        ``expected`` is a version that `fetch` returned, or None for a file that must not exist yet.
        Of several callers that race with the same expectation, one wins.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""

    def remove(self, folder: str) -> None:
        """Remove a folder without files; one that holds a file stays."""

    def sweep(self, folder: str) -> None:
        """Remove the files that killed writers left directly below a folder."""

    def unpublished(self, folder: str) -> list[Unpublished]:
        """Return the unpublished files directly below a folder; removes nothing."""

    def where(self, name: str) -> str:
        """Return the path or URL of a name."""
