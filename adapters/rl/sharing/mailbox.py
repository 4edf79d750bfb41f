"""The files by which runs share groups: one a group, created where there is none, in any store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from holdfast.adapters.rl.samples.borrowed import GroupOrigin, SharedGroup, borrowed_from
from holdfast.adapters.rl.samples.sealed import DIGEST_BYTES, opened, sealed
from holdfast.ckpt.errors import CorruptError, NotFoundError
from holdfast.ckpt.store.base import Store
from holdfast.ckpt.store.places import open_store

_MOST_BYTES: Final = 64 << 20
_ROOT: Final = "sharing"
_LINEAGE: Final = re.compile("[0-9a-f]+")


class GroupMailbox:
    """One run's access to the groups of all.

    A file begins with the digest of what follows: a group as JSON. The file ``owners/NAME`` has the
    lineage of the run that shares under a name.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    @classmethod
    def at(cls, meet: str) -> GroupMailbox:
        """Return the access at a meeting place. Raises ``StoreError`` for what is no place."""
        return cls(open_store(meet))

    # -- the owner's side ------------------------------------------------------------------------

    def claim(self, island: str, lineage: str) -> None:
        """Take a name; an earlier run that has it loses it, and its groups."""
        self.store.write(_owner(island), [lineage.encode()])
        for former in self.store.names(_folder(island)):
            if former != lineage:
                self._remove(island, former, self._ordinals(island, former))

    def owner(self, island: str) -> str:
        """Return the lineage of the run that shares under a name, empty if there is none."""
        try:
            found = self.store.read(_owner(island), most_bytes=DIGEST_BYTES * 16).decode("ascii")
        except (NotFoundError, UnicodeDecodeError):
            return ""
        return found if _LINEAGE.fullmatch(found) else ""  # it becomes a part of paths

    def publish(self, group: str, origin: GroupOrigin) -> int:
        """Publish a group, given as JSON; return the bytes that were written.

        That is 0 where the group is there already. An owner that went back may have other bits of
        it now; those that were published first stay.
        """
        data = sealed(group.encode())
        is_first = self.store.replace(_file(origin), data, expected=None)
        return len(data) if is_first else 0

    def retain(self, island: str, lineage: str, *, keep: int) -> None:
        """Remove all but the newest ``keep`` groups of this run."""
        ordinals = self._ordinals(island, lineage)
        if len(ordinals) > keep:
            self._remove(island, lineage, ordinals[: len(ordinals) - keep])

    # -- the taker's side ------------------------------------------------------------------------

    def islands(self) -> list[str]:
        """Return the names of the runs that share."""
        return self.store.names(f"{_ROOT}/owners")

    def origins(self, island: str) -> list[GroupOrigin]:
        """Return the groups of a run that are there, the oldest first."""
        if not (lineage := self.owner(island)):
            return []
        return [
            GroupOrigin(island=island, lineage=lineage, ordinal=ordinal)
            for ordinal in self._ordinals(island, lineage)
        ]

    def read(self, origin: GroupOrigin) -> SharedGroup:
        """Return a group.

        Raises ``NotFoundError`` if its owner removed it, ``CorruptError`` if it is damaged.
        """
        name = _file(origin)
        where = self.store.where(name)
        data = opened(self.store.read(name, most_bytes=_MOST_BYTES), where=where)
        try:
            group = msgspec.json.decode(data, type=SharedGroup)
            borrowed_from(group)  # the parts of a sample must fit each other
        except (msgspec.MsgspecError, ValueError) as error:
            raise CorruptError(
                f"{where}: no group of this version: {error}; remove the file"
            ) from error
        if group.origin != origin:
            raise CorruptError(f"{where}: it has the group {group.origin}; remove the file")
        return group

    # -- files -----------------------------------------------------------------------------------

    def _ordinals(self, island: str, lineage: str) -> list[int]:
        names = self.store.names(f"{_folder(island)}/{lineage}")
        return sorted(int(name) for name in names if name.isdecimal())

    def _remove(self, island: str, lineage: str, ordinals: Sequence[int]) -> None:
        origins = (GroupOrigin(island=island, lineage=lineage, ordinal=o) for o in ordinals)
        self.store.delete(map(_file, origins))
        self.store.remove(f"{_folder(island)}/{lineage}")  # stays as long as a file is in it


def _owner(island: str) -> str:
    return f"{_ROOT}/owners/{island}"


def _folder(island: str) -> str:
    return f"{_ROOT}/groups/{island}"


def _file(origin: GroupOrigin) -> str:
    return f"{_folder(origin.island)}/{origin.lineage}/{origin.ordinal:012d}"
