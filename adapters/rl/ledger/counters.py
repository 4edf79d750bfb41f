"""Counters of an RL job's samples and tokens. Pure."""

from __future__ import annotations

import msgspec


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
