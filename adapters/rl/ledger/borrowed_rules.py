"""The checker's rules for samples of other runs, with a count of its own. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec

from holdfast.adapters.rl.samples.borrowed import Borrowed, GroupOrigin
from holdfast.ckpt.types import Json

_COUNTED: Final = 4096
"""The most origins of one run that are counted; the ledger takes none below the lowest of them."""


class BorrowedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A borrowed sample about to be trained, with its counts of tokens and log-probabilities."""

    origin: GroupOrigin
    sample: int
    tokens: int
    logprobs: int


def borrowed_row(sample: Borrowed) -> BorrowedRow:
    """Return the part of a borrowed sample that the checker looks at."""
    return BorrowedRow(
        origin=sample.origin,
        sample=sample.sample,
        tokens=len(sample.tokens),
        logprobs=len(sample.logprobs),
    )


class BorrowedRules:
    """Counts the groups that were trained on, by their origins."""

    def __init__(self) -> None:
        self._below: dict[tuple[str, str], int] = {}
        self._trained: dict[tuple[str, str], set[int]] = {}

    def check(
        self,
        step: int,
        rows: Sequence[BorrowedRow],
        *,
        group: int,
        island: str,
        recorded: AbstractSet[GroupOrigin],
    ) -> Iterator[str]:
        """Yield the violations of a step's borrowed ``rows``, and count their groups as trained.

        ``group`` is how many samples a group has, ``island`` this run's own name, and ``recorded``
        has the origins that the state before the step names.
        """
        samples: dict[GroupOrigin, Counter[int]] = {}
        for row in rows:
            samples.setdefault(row.origin, Counter())[row.sample] += 1
            if not row.tokens or row.tokens != row.logprobs:
                yield (
                    f"step {step}, sample {row.sample} of {row.origin}: {row.tokens} tokens, "
                    f"{row.logprobs} log-probabilities"
                )
        for origin, counted in samples.items():
            if not origin.island or not origin.lineage or origin.ordinal < 0:
                yield f"step {step} borrows a group of unknown origin: {origin}"
            if origin.island == island:
                yield f"step {step} borrows {origin}, a group of its own"
            if origin not in recorded:
                yield f"step {step} borrows {origin}, which no state recorded before"
            if self._is_trained(origin):
                yield f"step {step} borrows {origin} again"
            if sorted(counted.elements()) != list(range(group)):
                yield f"step {step}: {origin} has samples {sorted(counted.elements())}"
        for origin in sorted(recorded - samples.keys(), key=str):
            yield f"step {step} leaves {origin} out, which was recorded for it"
        for origin in samples:
            self._count(origin)

    def state_dict(self) -> list[Json]:
        """Return the counted origins as JSON values."""
        return [
            [island, lineage, self._below.get((island, lineage), 0), sorted(ordinals)]
            for (island, lineage), ordinals in self._trained.items()
        ]

    def load_state_dict(self, state: Sequence[Json]) -> None:
        """Replace them by what ``state_dict`` returned."""
        self._below = {(island, lineage): below for island, lineage, below, _ in state}
        self._trained = {(island, lineage): set(found) for island, lineage, _, found in state}

    def _is_trained(self, origin: GroupOrigin) -> bool:
        key = origin.island, origin.lineage
        is_old = origin.ordinal < self._below.get(key, 0)
        return is_old or origin.ordinal in self._trained.get(key, ())

    def _count(self, origin: GroupOrigin) -> None:
        key = origin.island, origin.lineage
        found = self._trained.setdefault(key, set())
        found.add(origin.ordinal)
        if len(found) > _COUNTED:
            self._below[key] = min(found) + 1
            found.remove(min(found))
