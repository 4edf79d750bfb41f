"""The result of a scenario's run: the file that every report and every test reads.

A run's folder holds ``scenario.toml``, ``strikes.json``, ``history/``, ``calm/`` if there was an
undisturbed run, and ``result.json``, which is a `Result`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.tools.chaos.judging.checker import HistoryVerdict
from holdfast.tools.chaos.scenarios.catalogue import World

RESULT: Final = "result.json"
SCENARIO: Final = "scenario.toml"
STRIKES: Final = "strikes.json"
HISTORY: Final = "history"
CALM: Final = "calm"


class ResultError(ConfigError):
    """A run's folder has no result, or one that cannot be read."""

    code = "HF028"
    remedy = "Give the folder of a finished run."


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """A strike that was tried; ``t`` is in wall-clock seconds, in a simulation in virtual ones.

    ``victim`` is a name for people ("trainer/1", "node b"); the strike ``missed`` if there was
    nothing to hit.
    """

    number: int
    kind: str
    victim: str
    t: float
    missed: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run; it ``held`` if the verdict has no violation and there is no problem.

    ``only`` holds the numbers of the strikes it was restricted to. ``problems`` lists faults
    outside the training (the job failed, was stuck, left something behind). ``replay`` is the
    command that repeats the run.
    """

    name: str
    world: World
    seed: int
    only: tuple[int, ...] | None
    held: bool
    seconds: float
    verdict: HistoryVerdict
    struck: tuple[Struck, ...]
    problems: tuple[str, ...]
    replay: str


def save(folder: Path, result: Result) -> None:
    """Write the result of a run into its folder, whole or not at all."""
    encoded = msgspec.json.format(msgspec.json.encode(result), indent=2)
    fresh = folder / f"{RESULT}.new"
    fresh.write_bytes(encoded + b"\n")
    fresh.replace(folder / RESULT)


def load(folder: Path) -> Result:
    """Return the result of a run; raises ``ResultError`` if none can be read."""
    path = folder / RESULT
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}; give the folder of a finished run") from error
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path}: this is not the result of a run: {error}") from error
