"""The contract between a world of real processes and the faults.

A world knows its processes, files and addresses (`JobAccess`); an injector implements one family of
faults. Neither knows the internals of the other, so one module and its rows of the catalogue add a
family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.ckpt.errors import HoldfastError
from holdfast.tools.chaos.scenarios.catalogue import Part
from holdfast.tools.chaos.scenarios.strikes import Strike


class Victim(msgspec.Struct, frozen=True, kw_only=True):
    """The victim of a strike: ``name`` for people ("trainer/1", "node b"), and its processes.

    ``pids`` lists the agent's process first, then the sidecar's, then the workers'. ``node`` is ""
    for a job without nodes, ``seat`` is "" for a victim that is not a worker.
    """

    name: str
    part: Part
    pids: tuple[int, ...]
    node: str = ""
    seat: str = ""


class JobAccess(Protocol):
    """Access to a job of real processes, for injectors."""

    @property
    def folder(self) -> Path:
        """A folder that belongs to this run and outlives the job."""

    @property
    def run(self) -> str:
        """The run id ("" without Holdfast); `arena.arena_path(run, node)` is a node's arena."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, dead or alive; none without Holdfast."""

    def victims(self, part: Part) -> list[Victim]:
        """Return all living victims of a part, sorted by name."""

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """Make a machine vanish with its memory; False if it is gone already.

        Also False if no other is left, unless ``even_last``: then the job loses all its memory.
        """

    def give_back(self, node: str) -> None:
        """Return a lost machine to the job, empty."""


Undo = Callable[[], None]
"""Ends a lasting fault; called once, from any thread, also if the victim is gone."""


class Injector(Protocol):
    """One family of faults."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Prepare before the job starts; return the environment that its processes need.

        Raises ``ScenarioError`` with a remedy for faults that are impossible on this machine.
        """

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Strike now; raises ``MissedError`` if there was nothing to hit.

        Returns the function that ends a lasting fault (the world calls it after ``lasts_s``).
        """

    def close(self) -> None:
        """Clean up everything."""


class MissedError(HoldfastError):
    """There was nothing to hit: the victim was gone."""

    code = "HF030"
    remedy = "None is needed: the result of the run notes that the fault missed."
