"""Follows a job's records at its coordinator, and lists its nodes' sidecars."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from holdfast.ckpt.errors import HoldfastError, NotFoundError
from holdfast.elastic.agent.reporting import NodeProcesses
from holdfast.elastic.agent.watch import KeyWatch, WatchedKeys
from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.membership.view import JobView, outcome_key, run_prefix
from holdfast.tools.live.members.finding import find, key_at, reach, unreached
from holdfast.tools.live.members.roll import Roll, RollCall


class MembersReader:
    """Reads a job's records as they change; writes nothing, holds no lease, and is no member.

    ``key_file`` and ``job`` are as those of `holdfast run`. Raises ``ConfigError`` for a wrong
    address or key file, ``NotFoundError`` if the coordinator does not answer, or has no such job.
    """

    def __init__(
        self,
        address: str,
        *,
        now: Callable[[], float],
        key_file: str | None = None,
        job: str | None = None,
    ) -> None:
        self.address, self.key, self._now = address, key_at(key_file), now
        self._coordinator = reach(address, self.key)
        try:
            self.run, wanted = find(self._coordinator, job=job)
            entries, revision = self._coordinator.range(run_prefix(self.run))
        except CoordinatorError as error:
            self._coordinator.close()
            raise unreached(address, error) from None
        except NotFoundError as error:
            self._coordinator.close()
            raise NotFoundError(f"--coordinator {address}: {error}") from None
        self.since_s = now()
        self.silence = ""
        self._lock = threading.Lock()
        self._keys, self._outcome = WatchedKeys(), dict[str, Entry]()
        self._view = JobView.from_entries(entries, run=self.run, wanted=wanted, revision=revision)
        self._call = RollCall()
        self._changed = False
        self._watched = reach(address, self.key)
        self._watch = KeyWatch(
            self._watched, run_prefix(self.run), start=self._on_entries, change=self._on_changes
        )

    def close(self) -> None:
        """Stop following."""
        self._watch.close()
        self._watched.close()
        self._coordinator.close()

    def roll(self) -> Roll:
        """Return the members as they are now, or were when the coordinator answered last.

        Raises ``CoordinatorError`` for records of another version of Holdfast.
        """
        with self._lock:
            return self._call.take(self._newest(), now_s=self._now())

    @property
    def over(self) -> bool:
        """True once the job has its outcome."""
        with self._lock:
            return self._newest().outcome is not None

    def ask(self) -> None:
        """Ask whether the coordinator is there; ``silence`` says why it does not answer."""
        try:
            self._coordinator.get(outcome_key(self.run))
            self.silence = ""
        except CoordinatorError as error:
            self.silence = str(error)

    def listed(self) -> dict[str, NodeProcesses]:
        """Return the nodes' sidecars and workers by their records."""
        with self._lock:
            nodes = self._newest().nodes
        return {
            name: NodeProcesses(
                agent=0,
                sidecar=0,
                address=record.sidecar,
                workers={worker.seat: worker.pid for worker in record.workers},
                unreachable=tuple(sorted(record.unreachable)),
            )
            for name, record in nodes.items()
        }

    def _newest(self) -> JobView:
        """Return the view of the records; the outcome stays when the job's keys are removed."""
        if self._changed:
            entries = {**self._outcome, **self._keys.entries}
            view = self._view
            try:
                self._view = JobView.from_entries(
                    entries.values(), run=self.run, wanted=view.wanted, before=view
                )
            except HoldfastError as error:
                self.silence = str(error)
            self._changed = False
        return self._view

    def _on_entries(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            self._keys.reset(entries)
            self._note_outcome(self._keys.entries.values())

    def _on_changes(self, events: Sequence[KeyEvent]) -> None:
        with self._lock:
            self._keys.apply(events)
            self._note_outcome(
                Entry(key=event.key, value=event.value, revision=event.revision)
                for event in events
                if event.kind is EventKind.PUT
            )

    def _note_outcome(self, entries: Iterable[Entry]) -> None:
        self._changed = True
        key = outcome_key(self.run)
        self._outcome |= {entry.key: entry for entry in entries if entry.key == key}
