"""The side of a ledger that gives out samples, and knows who works on which. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.adapters.rl.ledger.budget import Pressure
from holdfast.adapters.rl.ledger.plan import Assignment
from holdfast.adapters.rl.ledger.states import OrdinalState
from holdfast.adapters.rl.ledger.work.holdings import LedgerHoldings
from holdfast.adapters.rl.samples.trajectory import SampleId


class LedgerClaims(LedgerHoldings):
    """The claims of workers on the samples of open groups."""

    def claim(
        self, worker: str, *, free: int, version: int | None, full: bool = False
    ) -> list[Assignment]:
        """Give ``worker`` up to ``free`` samples, the most urgent first.

        ``version`` is that of the worker's weights; None: any. When pinned, it is the version that
        the worker is bound to by its current work, and all samples are of one version. A ``full``
        worker gets only samples that the next step waits for; under `pressure` all workers do.
        """
        pinned = self.plan.pinned
        restricted = full or self.pressure is not Pressure.NONE
        work: list[Assignment] = []
        candidates = self._groups.waiting.candidates(
            self._groups, version=version if pinned else None, only_awaited=restricted
        )
        for ordinal, sample in candidates:
            if len(work) == free:
                break
            wanted = self._taking.begin(ordinal, version)
            self._groups.claim((ordinal, sample), worker)
            group = self._groups[ordinal]
            trajectory = group.begun(sample)
            group.charged[sample] = trajectory.sampled
            work.append(Assignment(version=wanted, trajectory=trajectory))
        return work

    def hold(
        self, worker: str, keys: Iterable[SampleId], *, oldest: Mapping[SampleId, int] | None = None
    ) -> set[SampleId]:
        """Record that ``worker`` works on these samples; return those it should abandon.

        ``oldest`` maps a sample to the oldest version that sampled, or will sample, its tokens. It
        matters when steps take groups by arrival. If that version does not exist yet, then all of
        the tokens belong to a future that was rolled back, and the sample is abandoned.
        """
        abandon: set[SampleId] = set()
        for ordinal, sample in keys:
            group = self._groups.get(ordinal)
            over = group is None or sample in group.done or group.state is OrdinalState.DROPPED
            reported = (oldest or {}).get((ordinal, sample))
            if (
                group is None
                or over
                or group.claims.get(sample, worker) != worker
                or (reported is not None and reported > self.trained_steps)
                or not self._has_room(ordinal, reported)
            ):
                abandon.add((ordinal, sample))
            else:
                self._groups.claim((ordinal, sample), worker)
        return abandon

    def report(self, counts: Mapping[SampleId, int]) -> None:
        """Charge the token budget with the tokens sampled since the last report.

        ``counts`` maps a sample to the total of its sampled tokens.
        """
        for (ordinal, sample), count in counts.items():
            group = self._groups.get(ordinal)
            if group is not None:
                self._charge(group, sample, count)

    def beyond_budget(self, worker: str) -> set[SampleId]:
        """Return the claims of ``worker`` that it should set aside until the next step."""
        if self._budget.left != 0:
            return set()
        return {key for key in self.claimed(worker) if not self._taking.awaits(key[0])}

    def lose(self, worker: str) -> None:
        """Release everything that ``worker`` had claimed: the worker is lost."""
        self.counters.workers_lost += 1
        self._take_back(worker)

    def leave(self, worker: str) -> None:
        """Release the claims of ``worker``: it has handed over its samples and leaves."""
        self.counters.workers_left += 1
        self._take_back(worker)

    def _take_back(self, worker: str) -> None:
        self._groups.release(worker, self.claimed(worker))

    def abandon(self, worker: str, keys: Iterable[SampleId]) -> None:
        """Release single claims of ``worker``, which no longer works on them."""
        self._groups.release(worker, keys)

    def claimed(self, worker: str) -> set[SampleId]:
        """Return the samples that ``worker`` has claimed."""
        return self._groups.claimed(worker)
