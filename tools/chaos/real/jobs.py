"""The interface of a world to a job, whatever starts the job, and the building of its command."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from holdfast.elastic.agent.stacks import kernel_state
from holdfast.tools.chaos.faults.environment import LISTS, together
from holdfast.tools.chaos.faults.injector import JobAccess
from holdfast.tools.chaos.hooks import HISTORY
from holdfast.tools.chaos.judging.record import Told
from holdfast.tools.chaos.scenarios.scenario import Workload

MARK: Final = "HOLDFAST_CHAOS_RUN"
"""Environment variable of all processes of a job; each job has its own value."""


class JobFolders(msgspec.Struct, frozen=True, kw_only=True):
    """The folders of one job: of the whole run, of this job's history, and of its work."""

    folder: Path
    history: Path
    work: Path

    @classmethod
    def made(cls, folder: Path, *, history: str, work: str) -> JobFolders:
        """Make the folders."""
        found = cls(folder=folder, history=folder / history, work=folder / work)
        for path in (found.folder, found.history, found.work):
            path.mkdir(parents=True, exist_ok=True)
        return found


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The ending of a job."""

    ok: bool
    message: str


class RealJob(JobAccess, Protocol):
    """A job of real processes."""

    mark: str

    @property
    def coordinator(self) -> str:
        """Address of the job's coordinator after the start, "" if it has none."""

    def start(self, env: Mapping[str, str]) -> None:
        """Start the job, with ``env`` added to the environment of all its processes.

        Raises ``ConfigError`` or ``HoldfastError`` if it cannot be started.
        """

    def events(self) -> list[Told]:
        """Return the reports since the last call, by time."""

    def ending(self) -> Ending | None:
        """Return the ending of the job, None while it runs."""

    def struck(self, part: str) -> None:
        """Note that a part was hit: if the job dies of it, its starter starts it again."""

    def workers(self) -> list[int]:
        """Return the processes that train; their stacks show where a job is stuck."""

    def output(self) -> str:
        """Return everything that the job's processes printed."""

    def end(self) -> None:
        """End the rest of the job, gather its history, and release everything."""


def new_mark() -> str:
    """Return a mark that no other job has."""
    return f"chaos-{os.getpid():x}-{uuid.uuid4().hex[:8]}"


def argv(workload: Workload, place: JobFolders, *, source: Path) -> tuple[str, ...]:
    """Return the command; ``source`` is the folder of the scenario's file."""
    known = {"{python}": sys.executable, "{folder}": str(place.work), "{scenario}": str(source)}
    return tuple(_filled(word, known) for word in workload.command)


def words(workload: Workload, place: JobFolders, *, source: Path) -> tuple[str, ...]:
    """Return all strings that a scenario passes to a job: command, environment, settings."""
    env = environment(workload, place, source=source, mark="", more={})
    values = [env[name] for name in workload.env]
    return (*argv(workload, place, source=source), *values, *_strings(workload.settings))


def _strings(tree: object) -> Iterator[str]:
    """Yield all strings in a TOML value."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for each in tree.values():
            yield from _strings(each)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _strings(each)


def environment(
    workload: Workload, place: JobFolders, *, source: Path, mark: str, more: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a job's processes beyond that of this process."""
    known = {"{python}": sys.executable, "{folder}": str(place.work), "{scenario}": str(source)}
    own = {name: _filled(text, known) for name, text in workload.env.items()}
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    variables = {HISTORY: str(place.history), MARK: mark}
    first = {name: text for name, text in more.items() if name not in LISTS}
    return {**defaults, **together(more, own), **first, **variables}


def _filled(word: str, known: Mapping[str, str]) -> str:
    for name, text in known.items():
        word = word.replace(name, text)
    return word


def alive(pids: Sequence[int]) -> list[int]:
    """Return the living ones of the processes; a zombie does not count."""
    return [pid for pid in pids if pid and kernel_state(pid)[:1] not in ("", "Z")]
