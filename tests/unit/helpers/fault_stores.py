"""Stores that fail, for tests of savers, readers and removers of checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

from typing_extensions import Buffer

from holdfast.ckpt.store.base import SMALL_FILE_BYTES, Readable, Store, Unpublished

MODULES = (
    "doubles.pruning",
    "holdfast.ckpt.api",
    "holdfast.ckpt.checkpoints.catalog",
    "holdfast.ckpt.checkpoints.commit",
    "holdfast.ckpt.checkpoints.source",
)


@contextlib.contextmanager
def using(store: Store | Callable[[], Store]) -> Iterator[None]:
    """Let every root be ``store``, or what the function of that name gives the caller."""
    find = store if callable(store) else lambda: store
    with contextlib.ExitStack() as patches:
        for module in MODULES:
            patches.enter_context(mock.patch(f"{module}.open_store", lambda _: find()))
        yield


class Wrapped:
    """A store that does something before every operation. One name is one operation."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.root = inner, inner.root

    def about_to(self, operation: str, name: str) -> None:
        """Be told of what comes next."""

    def names(self, prefix: str) -> list[str]:
        self.about_to("names", prefix)
        return self.inner.names(prefix)

    def size(self, name: str) -> int | None:
        self.about_to("size", name)
        return self.inner.size(name)

    def read(self, name: str, *, most_bytes: int = SMALL_FILE_BYTES) -> bytes:
        self.about_to("read", name)
        return self.inner.read(name, most_bytes=most_bytes)

    def open(self, name: str) -> Readable:
        self.about_to("open", name)
        return self.inner.open(name)

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        data = b"".join(memoryview(part).cast("B") for part in parts)
        self.about_to("write", name)
        return self.inner.write(name, [data])

    def fetch(self, name: str) -> tuple[bytes, str]:
        self.about_to("fetch", name)
        return self.inner.fetch(name)

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        self.about_to("replace", name)
        return self.inner.replace(name, data, expected=expected)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.about_to("delete", name)
            self.inner.delete([name])

    def remove(self, folder: str) -> None:
        self.about_to("remove", folder)
        if not self.inner.names(folder):  # a folder is removed when nothing is left in it
            self.inner.remove(folder)

    def sweep(self, folder: str) -> None:
        self.inner.sweep(folder)

    def unpublished(self, folder: str) -> list[Unpublished]:
        return self.inner.unpublished(folder)

    def where(self, name: str) -> str:
        return self.inner.where(name)


CHANGES = ("write", "replace", "delete", "remove")


class Died(BaseException):
    """The process was killed."""


class DyingStore(Wrapped):
    """Takes ``changes`` changes; from then on the process is dead."""

    def __init__(self, inner: Store, *, changes: int) -> None:
        super().__init__(inner)
        self._left, self.dead = changes, False

    def about_to(self, operation: str, name: str) -> None:
        if operation in CHANGES:
            self.dead = self.dead or self._left == 0
            self._left -= 1
        if self.dead:
            raise Died(f"{operation} {name}")
