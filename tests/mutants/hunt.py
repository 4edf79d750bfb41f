"""The search for planted bugs, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from mutants import (
    cast,
    control,
    deciders,
    engines,
    ledger,
    memory,
    moving,
    policies,
    sea,
    sharing,
    skipping,
    store,
)
from mutants.bug import Bug, planted

BUGS: Final[tuple[Bug, ...]] = (
    *control.BUGS,
    *deciders.BUGS,
    *moving.BUGS,
    *memory.BUGS,
    *store.BUGS,
    *ledger.BUGS,
    *skipping.BUGS,
    *policies.BUGS,
    *cast.BUGS,
    *sharing.BUGS,
    *sea.BUGS,
    *engines.BUGS,
)

TRIALS: Final[dict[str, Callable[[int], str]]] = {
    "control": control.trial,
    "deciders": deciders.trial,
    "moving": moving.trial,
    "scenario": control.scenario_trial,
    "memory": memory.trial,
    "store": store.trial,
    "ledger": ledger.trial,
    "skipping": skipping.trial,
    "policies": policies.trial,
    "cast": cast.trial,
    "sharing": sharing.trial,
    "sea": sea.trial,
    "damage": sea.damaged_trial,
    "dealt": sea.dealt_trial,
    "guarded": sea.guarded_trial,
    "guarded-dealt": sea.guarded_dealt_trial,
    "pairs": sea.paired_trial,
    "engines": engines.trial,
}
"""Name → a small job that runs under a seed and returns what is wrong with it, or ""."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A seed under which a bug shows, the number of seeds tried, and the symptom."""

    seed: int
    tried: int
    how: str


def try_once(trial: str, seed: int) -> str:
    """Return the defect of one run, or ""; an error that ends the run is a defect as well."""
    try:
        return TRIALS[trial](seed)
    except Exception as error:  # noqa: BLE001 -- whatever a broken function leads to shows it
        return f"{type(error).__name__}: {error}"


def hunt(bug: Bug, *, seeds: Iterable[int]) -> Found | None:
    """Return the first seed under which a bug shows, None if there is none."""
    with planted(bug):
        for tried, seed in enumerate(seeds, 1):
            if how := try_once(bug.trial, seed):
                return Found(seed=seed, tried=tried, how=how)
    return None
