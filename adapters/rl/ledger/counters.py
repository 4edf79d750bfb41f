"""Counters of an RL job's samples and tokens, and of the tokens of each policy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from holdfast.adapters.rl.ledger.states import LedgerError
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.ckpt.types import Json


class Counters(msgspec.Struct, kw_only=True):
    """Counts of tokens and samples; a lower bound after a rollback of the ledger.

    ``tokens_recovered`` came out of a lost worker's log; ``tokens_resampled`` had been reported by
    a lost worker and were not in its log. ``samples_set_aside`` were beyond the token budget.
    ``samples_too_old`` were held by a late worker when the steps that could have taken them were
    already promised to other samples. ``groups_borrowed`` came from other runs,
    ``groups_missed`` are those that steps could have borrowed and found no group for.
    ``groups_skipped`` had equal rewards, and steps passed over them.
    """

    samples_accepted: int = 0
    tokens_sampled: int = 0
    tokens_recovered: int = 0
    tokens_resampled: int = 0
    duplicates_refused: int = 0
    redelivered: int = 0
    rolled_back: int = 0
    workers_lost: int = 0
    workers_left: int = 0
    samples_set_aside: int = 0
    samples_too_old: int = 0
    groups_reused: int = 0
    groups_borrowed: int = 0
    groups_missed: int = 0
    groups_skipped: int = 0


class PolicyBook(msgspec.Struct, kw_only=True):
    """The ``turns`` and ``tokens`` that a policy spoke in samples trained for the first time."""

    turns: int = 0
    tokens: int = 0


class Books:
    """The books of all policies, in the order of their ``names``."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._books = [PolicyBook() for _ in self.names]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Trained tokens of each policy."""
        return tuple(book.tokens for book in self._books)

    def add(self, samples: Iterable[Trajectory]) -> None:
        """Count every turn in the book of its speaker."""
        for sample in samples:
            for (start, end), speaker in zip(sample.spans, sample.speakers, strict=True):
                book = self._books[speaker]
                book.turns += 1
                book.tokens += end - start

    def state_dict(self) -> dict[str, Json]:
        """Return the names and the books as JSON values."""
        return {"names": list(self.names), "books": [msgspec.to_builtins(b) for b in self._books]}

    def load_state_dict(self, state: dict[str, Json]) -> None:
        """Replace the books by what ``state_dict`` returned.

        Raises ``LedgerError`` if they are of other policies.
        """
        if tuple(state["names"]) != self.names:
            raise LedgerError(
                f"the saved ledger is of a job with the policies {state['names']}, this one has "
                f"{[*self.names]}: keep names and order"
            )
        self._books = [msgspec.convert(book, PolicyBook) for book in state["books"]]

    def report(self) -> dict[str, Json]:
        """Return the books by name."""
        return dict(zip(self.names, map(msgspec.to_builtins, self._books), strict=True))


def spoken(sample: Trajectory) -> tuple[int, ...]:
    """Return how many tokens each policy spoke in a sample, up to the last one that spoke."""
    counts = [0] * (1 + max(sample.speakers, default=0))
    for (start, end), speaker in zip(sample.spans, sample.speakers, strict=True):
        counts[speaker] += end - start
    return tuple(counts)
