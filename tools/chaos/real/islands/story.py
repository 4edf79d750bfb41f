"""The histories of a job's islands and of their sea, read from the folders of a run."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from holdfast.ckpt.errors import HoldfastError, NotFoundError
from holdfast.ckpt.store.places import open_store
from holdfast.elastic.events import TideAdopted, UserEvent
from holdfast.elastic.islands.mailbox import Mailbox
from holdfast.elastic.sea.records import Founded, Merged, Part, Record
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Promises, check
from holdfast.tools.chaos.judging.history import HistoryError, of_events, reported
from holdfast.tools.chaos.judging.record import Consumed, History, Stated, StepCommit, Told
from holdfast.tools.chaos.judging.seas import RepeatedTide, SeaStory, check_sea, together
from holdfast.tools.chaos.scenarios.scenario import SEA, Checks
from holdfast.tools.islands.glance import records_of
from holdfast.tools.islands.replay import replay

FIRST: Final = "first"
"""The folder below an island's work with a checkpoint of the model's first weights, if there is."""

ENDED: Final = "ended"
"""The job's own event with which an island tells its ``weights`` at the end, as a digest."""

_RUNS_APART: Final = 1_000_000
_Line = TypeVar("_Line", StepCommit, Consumed, Stated)


def judge(
    history: Path, work: Path, *, calm: tuple[Path, Path] | None, checks: Checks
) -> tuple[HistoryVerdict, list[str]]:
    """Return the verdict on islands and their sea, and what cannot be read.

    ``calm`` are history and work of the undisturbed islands. They are compared bit for bit if
    ``checks.state`` says so: else they are other seas, and a step that is executed again may find
    other merges.
    """
    same = calm if checks.state == "bitwise" else None
    histories, problems = histories_of(history)
    verdicts = verdicts_on(histories, calm=same[0] if same is not None else None, checks=checks)
    try:
        story = sea_story(history, work)
        reference_sea = sea_story(*same, repeat=False) if same is not None else None
        sea = check_sea(story, reference=reference_sea)
    except HoldfastError as error:
        problems.append(f"the sea: {error}")
        sea = check_sea(SeaStory(records=(), adopted={}))
    return together(verdicts, sea), problems


def histories_of(history: Path) -> tuple[dict[str, History], list[str]]:
    """Return the history of each island, or policy, by name, and what cannot be read."""
    found: dict[str, History] = {}
    problems: list[str] = []
    for folder in sorted(path for path in history.iterdir() if path.is_dir()):
        try:
            found[folder.name] = history_of(folder)
        except HistoryError as error:
            problems.append(str(error))
    return found, problems


def verdicts_on(
    histories: Mapping[str, History], *, calm: Path | None, checks: Checks
) -> dict[str, HistoryVerdict]:
    """Return the verdict on each history; ``calm`` has those of the undisturbed job."""
    promises = Promises(undone_most=checks.undone_most, dense=checks.dense)
    verdicts: dict[str, HistoryVerdict] = {}
    for name, found in histories.items():
        reference, told = None, found
        if calm is not None:
            with contextlib.suppress(HistoryError):  # its failure is among the problems already
                reference = history_of(calm / name)
        if checks.state == "none":
            told = History(commits=found.commits, consumed=found.consumed)
        verdicts[name] = check(told, reference=reference, promises=promises)
    return verdicts


def history_of(folder: Path) -> History:
    """Return the history of an island: of all its runs, whose attempts follow each other.

    Raises ``HistoryError`` if nothing is reported there, or a line cannot be read.
    """
    found = [of_events(reported(each)) for each in _runs(folder)]
    if not any(each.commits for each in found):
        raise HistoryError(f"{folder}: it reported no step; look at its logs")
    commits: list[StepCommit] = []
    consumed: list[Consumed] = []
    states: list[Stated] = []
    for number, one in enumerate(found):
        since = number * _RUNS_APART
        commits += (_later(each, since) for each in one.commits)
        consumed += (_later(each, since) for each in one.consumed)
        states += (_later(each, since) for each in one.states)
    return History(commits=tuple(commits), consumed=tuple(consumed), states=tuple(states))


def _later(line: _Line, since: int) -> _Line:
    return msgspec.structs.replace(line, attempt=line.attempt + since)


def _runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(folder.iterdir(), key=lambda path: int(path.name))


def sea_story(history: Path, work: Path, *, repeat: bool = True) -> SeaStory:
    """Return the story of a sea below ``work``; with ``repeat`` its merges are made once more.

    Raises ``HoldfastError`` for a sea that cannot be read.
    """
    store = open_store(work / SEA)
    records = records_of(store)
    adopted: dict[str, dict[int, frozenset[str]]] = {}
    ends: dict[str, frozenset[str]] = {}
    for folder in sorted(path for path in history.iterdir() if path.is_dir()):
        events = [event for each in _runs(folder) for event in reported(each)]
        adopted[folder.name] = _adopted(events)
        if told := _ends(events):
            ends[folder.name] = told
    firsts = sorted(work.glob(f"*/{FIRST}"))
    repeated = _repeated(records, firsts[0], Mailbox(store)) if repeat and firsts else ()
    return SeaStory(records=records, adopted=adopted, ends=ends, repeated=repeated)


def _adopted(events: Sequence[Told]) -> dict[int, frozenset[str]]:
    found: defaultdict[int, set[str]] = defaultdict(set)
    for each in events:
        if isinstance(each, TideAdopted):
            found[each.tide].add(each.state)
    return {tide: frozenset(digests) for tide, digests in found.items()}


def _ends(events: Sequence[Told]) -> frozenset[str]:
    return frozenset(
        str(each.fields.get("weights"))
        for each in events
        if isinstance(each, UserEvent) and each.name == ENDED
    )


def _repeated(records: Sequence[Record], first: Path, box: Mailbox) -> tuple[RepeatedTide, ...]:
    """Make all merges of a logbook once more, from a checkpoint of the first weights."""
    from holdfast.tools.islands.replayed_sea import ReplayedSea  # with torch

    founded = records[0]
    assert isinstance(founded, Founded)
    sea = ReplayedSea(founded)
    try:
        bases = sea.load(first, step=None)
    except NotFoundError:
        return ()  # its writer was killed before it was whole
    digests: dict[int, str] = {}

    class Watched:
        """The replayed sea, which notes the digests after every merge."""

        def digest(self, portion: int) -> str:
            return sea.digest(portion)

        def merge(self, record: Merged, payloads: Sequence[bytes]) -> None:
            sea.merge(record, payloads)
            digests[record.tide] = sea.digest(record.portion)

    def payload(part: Part) -> bytes:
        return box.payload(part.island, part.digest)

    outcomes = replay(records, bases, Watched(), payload)
    return tuple(
        RepeatedTide(tide=each.tide, outcome=each.outcome, digest=digests.get(each.tide, ""))
        for each in outcomes
    )
