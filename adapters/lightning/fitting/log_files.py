"""Loggers of Lightning whose files get the points of each step once, whoever writes them."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from holdfast.adapters.lightning.fitting.marks import LogMark

Point = tuple[dict[str, float], int]
"""Values by their names, and the step that the logger shows."""


class LogFiles(ABC):
    """The files of one logger; rank 0 opens them when the first step is protected.

    ``run`` is the name of the run, ``version`` that of the logger's folder.
    """

    def __init__(self, logger: Any, *, run: str, hparams: dict[str, Any] | None) -> None:
        self._logger, self._run, self._hparams = logger, run, hparams
        self._mark: LogMark | None = None

    def write(self, step: int, points: list[Point]) -> None:
        """Write the points of a step, unless the files have it already."""
        mark = self._mark or self._opened()
        if step > mark.step:
            for values, shown in points:
                self._logger.log_metrics(values, shown)
            self._logger.save()
            mark = self._marked(step, mark.rows + len(points))
        self._mark = mark

    def _opened(self) -> LogMark:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._logger._experiment = None
        mark = LogMark.read(self._folder, self._run)
        self._cut(mark)
        if mark is not None:
            return mark
        if self._hparams is not None:
            self._logger.log_hyperparams(self._hparams)
            self._logger.save()
        return self._marked(-1, 0)

    def _marked(self, step: int, rows: int) -> LogMark:
        mark = LogMark(run=self._run, step=step, rows=rows, files=self._sizes())
        mark.write(self._folder)
        return mark

    @property
    def _folder(self) -> Path:
        return Path(self._logger.log_dir)

    @abstractmethod
    def _cut(self, mark: LogMark | None) -> None:
        """Take away all that came after the mark, and open the logger; None is a new run."""

    def _sizes(self) -> dict[str, int]:
        return {}


class _WholeRows(ExperimentWriter):  # type: ignore[misc]
    """A writer that keeps the rows that are there, and changes the header in one step."""

    def _check_log_dir_exists(self) -> None:
        pass

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        place = Path(self.metrics_file_path)
        write_rows(place, fieldnames, rows_of(place)[1])


class CsvFiles(LogFiles):
    """The table of a CSVLogger."""

    def _cut(self, mark: LogMark | None) -> None:
        writer = self._logger._experiment = _WholeRows(log_dir=str(self._folder))
        place = Path(writer.metrics_file_path)
        if mark is None:
            place.unlink(missing_ok=True)  # as Lightning does
        elif place.exists():
            header, rows = rows_of(place)
            if len(rows) != mark.rows:
                write_rows(place, header, rows[: mark.rows])
            writer.metrics_keys = header


class TensorBoardFiles(LogFiles):
    """The event files of a TensorBoardLogger."""

    _PATTERN: Final = "events.out.tfevents.*"

    def _cut(self, mark: LogMark | None) -> None:
        if mark is None:
            return  # the files of another run stay, as with Lightning
        for place in self._folder.glob(self._PATTERN):
            if place.name not in mark.files:
                place.unlink()
            elif place.stat().st_size > mark.files[place.name]:
                with place.open("r+b") as file:
                    file.truncate(mark.files[place.name])

    def _sizes(self) -> dict[str, int]:
        self._logger.experiment.flush()
        return {each.name: each.stat().st_size for each in self._folder.glob(self._PATTERN)}


KINDS: Final[Mapping[str, Callable[..., LogFiles]]] = {
    "CSVLogger": CsvFiles,
    "TensorBoardLogger": TensorBoardFiles,
}
"""The files of each kind of logger."""


def rows_of(place: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the header and the rows of a table."""
    with place.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    return list(reader.fieldnames or ()), rows


def write_rows(place: Path, header: list[str], rows: list[dict[str, str]]) -> None:
    """Put a table in place of the one there."""
    beside = place.with_name(f".{place.name}.new")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=header, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(place)
