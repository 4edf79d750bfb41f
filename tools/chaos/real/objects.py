"""Search for a job's leftovers among its checkpoints: files that no committed step needs.

Checkpoints are found below the folder that the job works in, and at places that a word of its
command, environment or settings names: an address (``s3://…``, ``gs://…``, ``az://…``) or an
absolute path. Files that existed before the job do not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from holdfast.ckpt.checkpoints.unreferenced import Unreferenced, UnreferencedKind, unreferenced
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.store.places import SCHEMES, open_store, scheme_of
from holdfast.elastic.events import CheckpointFailed, CheckpointSkipped
from holdfast.elastic.events.log import EventReader

_STEP: Final = re.compile(r"step-[0-9]{12}")


class Objects:
    """The places where one job keeps checkpoints, recorded before its start.

    ``words`` are the job's strings (`jobs.words`), ``work`` is the folder that it works in.
    """

    def __init__(self, words: Iterable[str], work: Path) -> None:
        self._work = work
        own = work.absolute()
        self._named = [each for each in places_named(words) if not _is_below(each, own)]
        self._before = {each.where for root in self._named for each in _found(root)[0]}

    def left(self, *, ended_well: bool, hurt: bool) -> list[str]:
        """Return the leftovers of an ended job; ``hurt`` says whether it was struck.

        If the job failed, unfinished saves may remain. The same holds for steps that it reported as
        not saved. Killed writers leave uploads for a day, because the store cannot know that the
        writer is dead.
        """
        not_saved = _not_saved(self._work)
        problems: list[str] = []
        for root in [*_roots_below(self._work), *self._named]:
            found, failure = _found(root)
            problems += [failure] if failure else []
            problems += [
                f"left behind: {each.where}: {each.kind.value}"
                for each in found
                if each.where not in self._before
                and is_leak(each, ended_well=ended_well, hurt=hurt, not_saved=not_saved)
            ]
        return list(dict.fromkeys(problems))  # a place may have two names


def is_leak(each: Unreferenced, *, ended_well: bool, hurt: bool, not_saved: set[int]) -> bool:
    """Return whether a find counts as a leak of an ended job. Pure."""
    if each.kind is UnreferencedKind.FILE:
        return True
    if each.kind is UnreferencedKind.BEGUN and hurt:
        return False
    return ended_well and each.step not in not_saved


def places_named(words: Iterable[str]) -> list[str]:
    """Return the places that words name, also in ``--option=PLACE``, each once. Pure."""
    found = dict.fromkeys(
        part
        for word in words
        for part in (word, word.partition("=")[2])
        if scheme_of(part) in SCHEMES or part.startswith("/")
    )
    return list(found)


def _is_below(named: str, folder: Path) -> bool:
    return named.startswith("/") and Path(os.path.normpath(named)).is_relative_to(folder)


def _roots_below(folder: Path) -> list[str]:
    """Return the folders below one, itself included, that contain steps."""
    found = []
    for path, names, _ in os.walk(folder):
        if steps := [name for name in names if _STEP.fullmatch(name)]:
            found.append(path)
            names[:] = [name for name in names if name not in steps]
    return sorted(found)


def _found(root: str) -> tuple[list[Unreferenced], str]:
    """Return the files that no step needs at a place, and why it could not be read, "" if it could.

    A path that is no folder holds nothing.
    """
    if root.startswith("/") and not Path(root).is_dir():
        return [], ""
    try:
        return list(unreferenced(open_store(root))), ""
    except CkptError as error:
        return [], f"cannot list the files that are left in the checkpoint's store: {error}"


def _not_saved(work: Path) -> set[int]:
    """Return the steps that a Holdfast job reported as not saved."""
    found: set[int] = set()
    for folder in {path.parent for path in work.rglob("events-*.jsonl")}:
        for event in EventReader(folder).new():
            match event:
                case CheckpointFailed(step=step) | CheckpointSkipped(step=step):
                    found.add(step)
    return found
