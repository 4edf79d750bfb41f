"""Effects outside of the run that wait until their step is protected.

A step that is not protected may be lost and repeated. Then its points and files come again, so none
of them may be seen before. The entries are part of the run's state, those of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

_MARK: Final = ".holdfast-"

Act = Callable[[int, list[Any]], object]
"""An effect: gets the number of the step and all that was kept for it, in order."""


class Later:
    """The entries that wait, as lists of a step's number, a kind and a plain value.

    ``step`` returns the number of the present step. Only rank 0 ``leads`` and keeps entries.
    """

    def __init__(self, step: Callable[[], int], *, leads: bool) -> None:
        self._step, self._leads = step, leads
        self.waiting: list[list[Any]] = []

    def add(self, kind: str, value: Any) -> None:
        """Keep a plain value for the effect of that kind."""
        if self._leads:
            self.waiting.append([self._step(), kind, value])

    def act(self, until: int, acts: Mapping[str, Act]) -> None:
        """Do and drop everything that waits for the steps up to ``until``, step by step."""
        due = [each for each in self.waiting if each[0] <= until]
        self.waiting = [each for each in self.waiting if each[0] > until]
        for step in sorted({each[0] for each in due}):
            for kind, act in acts.items():
                if values := [value for number, its, value in due if (number, its) == (step, kind)]:
                    act(step, values)


class SavedFiles:
    """The files that callbacks save and remove, under the names that they have once protected.

    ``known`` are the paths that exist after the present step; a path is a string. A file is written
    beside its place at once, and moved there later.
    """

    def __init__(self, later: Later, *, leads: bool) -> None:
        self._later, self._leads = later, leads
        self.known: set[str] = set()

    def begin(self, folder: Path, suffix: str) -> None:
        """Note the files of a folder that were there before the run."""
        if folder.is_dir():
            self.known |= {str(each) for each in folder.rglob(f"*{suffix}")}

    def exists(self, path: str) -> bool:
        """Say whether a file will be at ``path``."""
        return str(path) in self.known

    def save(self, path: str, write: Callable[[Path], object], *, step: int) -> None:
        """Write a file, which gets its name later."""
        place = Path(path)
        self.known.add(str(path))
        if self._leads:
            beside = place.with_name(f"{_MARK}{step}-{place.name}")
            place.parent.mkdir(parents=True, exist_ok=True)
            write(beside)
            _sync(beside)
        self._later.add("file", [str(place.with_name(f"{_MARK}{step}-{place.name}")), str(path)])

    def remove(self, path: str) -> None:
        """Remove a file later."""
        self.known.discard(str(path))
        self._later.add("file", ["", str(path)])

    def act(self, _: int, values: list[list[str]]) -> None:
        """Move files to their names, and remove others."""
        for beside, path in values:
            if not beside:
                Path(path).unlink(missing_ok=True)
            elif Path(beside).exists():  # else it was moved already
                Path(beside).replace(path)

    def finish(self) -> None:
        """Remove files of steps that were lost and did not come again alike."""
        for folder in {Path(each).parent for each in self.known} if self._leads else ():
            for left in folder.glob(f"{_MARK}*-*"):
                left.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
