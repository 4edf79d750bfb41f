"""A store of a simulated sea: one truth, and for each island a way to it that fails.

A call takes time, during which other islands act. It may fail before anything has happened, or
after it has, so that only the reply is lost; and a write may happen a second time, later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from typing_extensions import Buffer

from holdfast.ckpt.errors import NotFoundError, StoreError
from holdfast.elastic.testing.seas.tasks import Tasks

_Result = TypeVar("_Result")


@dataclass(slots=True, kw_only=True)
class Way:
    """The state of an island's way to the store.

    ``fails``, ``loses`` and ``doubles`` are probabilities of a call; ``slow`` multiplies its time;
    until ``cut_s`` every call fails.
    """

    fails: float = 0.0
    loses: float = 0.0
    doubles: float = 0.0
    slow: float = 1.0
    cut_s: float = 0.0


@dataclass(slots=True)
class Files:
    """The files; ``watch`` gets each that is new or changed.

    ``writer`` is the island that writes now, ``wrote_s`` has the times at which each wrote.
    """

    data: dict[str, bytes] = field(default_factory=dict)
    watch: Callable[[str, bytes], None] = lambda _name, _data: None
    writer: str = ""
    wrote_s: dict[str, list[float]] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> None:
        """Write a file."""
        self.data[name] = data
        self.watch(name, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it is there; return whether it was written."""
        if name in self.data:
            return False
        self.write(name, data)
        return True


class SimulatedStore:
    """One island's `holdfast.ckpt.store.base.Store`, as far as islands use it."""

    root = "sea"

    def __init__(
        self, files: Files, tasks: Tasks, way: Way, *, island: str, random: Random
    ) -> None:
        self._files, self._tasks, self._way, self._random = files, tasks, way, random
        self._island = island

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below a folder, sorted."""
        start = f"{prefix}/"

        def listed() -> list[str]:
            below = [name[len(start) :] for name in self._files.data if name.startswith(start)]
            return sorted({name.partition("/")[0] for name in below})

        return self._call(listed)

    def size(self, name: str) -> int | None:
        """Return a file's size, None if there is none."""
        return self._call(lambda: len(d) if (d := self._files.data.get(name)) is not None else None)

    def read(self, name: str, *, most_bytes: int = 1 << 30) -> bytes:
        """Return a file's bytes."""
        data = self._call(lambda: self._files.data.get(name))
        if data is None:
            raise NotFoundError(f"{name}: not there")
        assert len(data) <= most_bytes
        return data

    def write(self, name: str, parts: Iterable[Buffer]) -> int:
        """Write a file; return its size."""
        data = b"".join(bytes(part) for part in parts)
        self._write(lambda: self._files.write(name, data))
        return len(data)

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        """Create a file; return whether this call did."""
        assert expected is None
        return self._write(lambda: self._files.create(name, data))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in list(names):
            self._call(functools.partial(self._files.data.pop, name, None))

    def remove(self, folder: str) -> None:
        """Remove a folder: there is none without files."""

    def where(self, name: str) -> str:
        """Return the path of a name."""
        return f"{self.root}/{name}"

    def _write(self, operation: Callable[[], _Result]) -> _Result:
        """Write, and perhaps once more later."""

        def noted() -> _Result:
            self._files.writer = self._island
            result = operation()
            self._files.wrote_s.setdefault(self._island, []).append(self._tasks.now_s)
            return result

        def again() -> None:
            operation()

        result = self._call(noted)
        if self._random.random() < self._way.doubles:
            self._tasks.start(again, group="network", after_s=20 * self._random.random())
        return result

    def _call(self, operation: Callable[[], _Result]) -> _Result:
        draw, way, tasks = self._random.random, self._way, self._tasks
        tasks.sleep((0.002 + 0.02 * draw()) * way.slow)
        if tasks.now_s < way.cut_s or draw() < way.fails:
            tasks.sleep(0.5)
            raise StoreError("the store cannot be reached")
        result = operation()
        if draw() < way.loses:
            raise StoreError("the reply of the store is lost")
        return result
