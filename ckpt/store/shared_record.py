"""A small file that processes on several hosts replace as a whole, by compare-and-set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

import msgspec

from holdfast.ckpt.errors import CorruptError, NotFoundError, StoreError
from holdfast.ckpt.store.base import Store

_ATTEMPTS: Final = 20
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class SharedRecord(Generic[_T]):
    """The file ``path`` of a store: a ``kind`` as JSON, of which no change is ever lost.

    ``absent`` stands for a file that does not exist. ``damaged`` is what the error of a damaged
    file says of it: what it should be, and the remedy; ``{}`` stands for what is wrong.
    """

    path: str
    kind: type[msgspec.Struct]
    absent: _T
    damaged: str

    def load(self, store: Store) -> _T:
        """Return the record. Raises ``CorruptError`` if it is damaged."""
        return self._fetch(store)[0]

    def change(self, store: Store, after: Callable[[_T], _T]) -> _T:
        """Replace the record by ``after`` of it, and return the new one.

        ``after`` is called again when another process was faster. Raises ``StoreError`` when others
        kept changing it.
        """
        for _ in range(_ATTEMPTS):
            known, version = self._fetch(store)
            wanted = after(known)
            if wanted == known:
                return wanted
            if store.replace(self.path, msgspec.json.encode(wanted), expected=version):
                return wanted
        raise StoreError(
            f"{store.where(self.path)}: others kept changing it over {_ATTEMPTS} attempts; "
            "try again"
        )

    def _fetch(self, store: Store) -> tuple[_T, str | None]:
        try:
            data, version = store.fetch(self.path)
        except NotFoundError:
            return self.absent, None
        try:
            return cast("_T", msgspec.json.decode(data, type=self.kind)), version
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            why = self.damaged.format(error)
            raise CorruptError(f"{store.where(self.path)}: {why}") from error
