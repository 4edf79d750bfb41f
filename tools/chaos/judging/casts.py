"""The check of runs that train one policy each: all train on the samples of the lead. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from holdfast.tools.chaos.judging.checker import HistoryVerdict, Violation
from holdfast.tools.chaos.judging.record import History

SAMPLES_OF_THE_LEAD: Final = "samples of the lead"


def check_cast(runs: Mapping[str, History], *, lead: str) -> HistoryVerdict:
    """Return the verdict on the runs beside each other, by the name of their policy.

    Only the reports of each run's rank 0 are compared.
    """
    told = {name: _first_rank(history) for name, history in runs.items()}
    is_known = lead in runs and all(told.values())
    found = _differing(told, lead=lead) if is_known else ()
    return HistoryVerdict(
        attempts=0,
        steps=0,
        executed=0,
        undone=0,
        undone_most=0,
        samples=0,
        checked=(SAMPLES_OF_THE_LEAD,) if is_known else (),
        violations=tuple(Violation(check=SAMPLES_OF_THE_LEAD, message=each) for each in found),
    )


def _differing(
    told: Mapping[str, Mapping[int, frozenset[int | str]]], *, lead: str
) -> Iterator[str]:
    """Yield the first step of each run that trained on other samples than the lead's."""
    ours = told[lead]
    for name, theirs in told.items():
        wrong = sorted(step for step in ours.keys() | theirs if ours.get(step) != theirs.get(step))
        if wrong:
            own, its = ours.get(wrong[0], frozenset()), theirs.get(wrong[0], frozenset())
            yield (
                f"{name}: {len(wrong)} steps trained on other samples than {lead}; step {wrong[0]} "
                f"has {len(its - own)} others and lacks {len(own - its)}"
            )


def _first_rank(history: History) -> dict[int, frozenset[int | str]]:
    """Return the samples that rank 0 trained on, by surviving step."""
    kept = (each for each in history.consumed if each.rank == 0 and history.survives(each))
    return {each.step: frozenset(each.ids) for each in kept}
