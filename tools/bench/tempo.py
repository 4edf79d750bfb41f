"""How far a section is, for the progress bar."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from holdfast.tools.bench.samples import BenchSetup


class Tempo:
    """Shares the rounds that a section has on the bar out over its ``total`` parts."""

    def __init__(self, setup: BenchSetup, *, total: int) -> None:
        self._setup, self._total = setup, total
        self._rounds, self._parts, self._laps = setup.repeat + 1, 0, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lap(self._rounds)

    def say(self, text: str) -> None:
        """Tell what is being done."""
        self._setup.say(text)

    def beat(self) -> None:
        """Say that one more part is done."""
        self._parts += 1
        self._lap(self._rounds * self._parts // self._total)

    def _lap(self, due: int) -> None:
        while self._laps < due:
            self._laps += 1
            self._setup.lap()
