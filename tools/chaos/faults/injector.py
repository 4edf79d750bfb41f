"""The contract between a world of real processes and what hurts it.

A world knows its processes, files and addresses (`JobAccess`); an injector knows how to do one
family of faults. Neither knows the other's inside, so a family is added by one module and its rows
of the catalogue.
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
    """Whom a strike found: ``name`` for people ("trainer/1", "node b"), and its processes.

    ``pids`` has the agent's before the sidecar's before the workers'. ``node`` is "" for a job that
    has none, ``seat`` for what is not a worker.
    """

    name: str
    part: Part
    pids: tuple[int, ...]
    node: str = ""
    seat: str = ""


class JobAccess(Protocol):
    """What a job of real processes offers to those that hurt it."""

    @property
    def folder(self) -> Path:
        """A folder of this run's own, that outlives the job."""

    @property
    def run(self) -> str:
        """The run id ("" without Holdfast); `arena.arena_path(run, node)` is a node's arena."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes, dead or alive; none without Holdfast."""

    def victims(self, part: Part) -> list[Victim]:
        """Return all living ones of a part, sorted by name."""

    def lose(self, node: str, *, even_last: bool = False) -> bool:
        """Have a machine vanish with its memory; False when it is gone already.

        Also False when no other is left, unless ``even_last``: then the job loses all its memory.
        """

    def give_back(self, node: str) -> None:
        """Have a lost machine return, empty."""


Undo = Callable[[], None]
"""Ends a fault that lasts; called once, from any thread, also when its victim is gone."""


class Injector(Protocol):
    """One family of faults."""

    def prepare(self, site: JobAccess, strikes: tuple[Strike, ...]) -> Mapping[str, str]:
        """Make ready before the job starts; return what its processes' environment must have.

        Raises ``ScenarioError`` for what cannot be done on this machine, with the remedy.
        """

    def strike(self, strike: Strike, victim: Victim, site: JobAccess) -> Undo | None:
        """Do it now; raises ``MissedError`` when there was nothing to hit.

        Returns what ends it, if it lasts (the world calls that after ``lasts_s``).
        """

    def close(self) -> None:
        """Leave nothing behind."""


class MissedError(HoldfastError):
    """There was nothing to hit: the victim was gone."""

    code = "HF030"
    remedy = "None is needed: the result of the run notes that the fault missed."
