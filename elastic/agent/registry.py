"""The node's writes to the coordinator, under its lease.

An unreachable coordinator is not fatal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from holdfast.elastic.coordinator.base import Coordinator
from holdfast.elastic.errors import CoordinatorError, LeaseExpiredError
from holdfast.elastic.membership.differences import Divisible
from holdfast.elastic.membership.divided import divided, parts_of, superseded
from holdfast.elastic.membership.records import (
    Bulletin,
    Decider,
    GenerationRecord,
    JobOutcome,
    NodeRecord,
    Seating,
)
from holdfast.elastic.membership.view import (
    JobView,
    bulletin_key,
    decider_key,
    encode,
    generation_key,
    node_key,
    outcome_key,
    seating_key,
)


class Registry:
    """Writes the records of one run. A failed write returns False; the caller retries later.

    ``lease`` returns the lease of the node's record.
    """

    def __init__(self, coordinator: Coordinator, *, run: str, lease: Callable[[], int]) -> None:
        self._coordinator, self._run, self._lease = coordinator, run, lease
        self._published: tuple[NodeRecord, int] | None = None
        self._revision = 0

    def publish(self, record: NodeRecord) -> bool:
        """Publish the node's record if it or the lease changed; return whether it is published."""
        lease = self._lease()
        if (record, lease) == self._published:
            return True
        try:
            key = node_key(self._run, record.node)
            self._revision = self._coordinator.put(key, encode(record), lease=lease)
        except (CoordinatorError, LeaseExpiredError):
            return False
        self._published = record, lease
        return True

    def withdraw(self, node: str) -> None:
        """Delete the node's record, so that the others continue at once."""
        self._published = None
        with contextlib.suppress(CoordinatorError):  # otherwise its lease ends a little later
            self._coordinator.delete(node_key(self._run, node))

    def forget(self) -> None:
        """Publish again next time: another process deleted the record."""
        self._published = None

    def shown(self, revision: int) -> None:
        """Note that the node's key was written at ``revision``.

        If this is newer than the last published revision, an older write of this node took effect
        late, perhaps under a lease that is about to end. Then the record is published again.
        """
        if revision > self._revision:
            self.forget()

    def seat(
        self, seats: tuple[Seating, ...], *, expected: int, beside: JobView | None = None
    ) -> bool:
        """Change the seating; divide it if it is given the view from which it was made.

        Returns False if another node was faster or the coordinator is unreachable.
        """
        key = seating_key(self._run)
        if beside is None:
            return self._set(key, seats, expected=expected)
        return self._set_divided(key, seats, expected=expected, before=beside.seating)

    def propose(
        self, record: GenerationRecord, *, expected: int, beside: JobView | None = None
    ) -> bool:
        """Append a generation to the chain; ``beside`` and False as for `seat`."""
        key = generation_key(self._run)
        if beside is None:
            return self._set(key, record, expected=expected)
        return self._set_divided(key, record, expected=expected, before=beside.generation)

    def finish(self, outcome: JobOutcome) -> bool:
        """Write the job's outcome; False if there is one already, or as for `seat`."""
        return self._set(outcome_key(self._run), outcome, expected=0)

    def tell(self, bulletin: Bulletin, *, expected: int) -> bool:
        """Publish a bulletin; False as for `seat`."""
        return self._set(bulletin_key(self._run), bulletin, expected=expected)

    def claim(self, place: int, decider: Decider) -> bool:
        """Take a free place of a decider, under the node's lease; False as for `seat`."""
        key, lease = decider_key(self._run, place), self._lease()
        try:
            return self._coordinator.compare_and_set(key, encode(decider), expected=0, lease=lease)
        except (CoordinatorError, LeaseExpiredError):
            return False

    def resign(self, place: int) -> None:
        """Give a place of a decider up; if that fails, the lease ends it a little later."""
        with contextlib.suppress(CoordinatorError):
            self._coordinator.delete(decider_key(self._run, place))

    def look_at_own(self, node: str) -> None:
        """Read the node's key, and publish again if it is gone or not as last published."""
        try:
            found = self._coordinator.get(node_key(self._run, node))
        except CoordinatorError:
            return
        if found is None:
            self.forget()
        else:
            self.shown(found.revision)

    def _set(self, key: str, value: object, *, expected: int) -> bool:
        try:
            return self._coordinator.compare_and_set(key, encode(value), expected=expected)
        except CoordinatorError:
            return False

    def _set_divided(
        self, key: str, record: Divisible, *, expected: int, before: Divisible | None
    ) -> bool:
        """Write the parts, then the head, which commits; then remove the parts of before."""
        found = divided(key, record, base=expected, before=before)
        try:
            for part, text in found.parts.items():
                self._coordinator.put(part, text)
            done = self._coordinator.compare_and_set(key, found.head, expected=expected)
        except CoordinatorError:
            return False
        if done:
            with contextlib.suppress(CoordinatorError):  # else the next one removes them
                there = [entry.key for entry in self._coordinator.range(parts_of(key))[0]]
                for part in superseded(key, there, base=expected, own=found.parts):
                    self._coordinator.delete(part)
        return done
