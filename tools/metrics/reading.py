"""The reader of a run whose samples the server gives: it reads on its own, whoever scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.events import Event
from holdfast.tools.beside.reading import OrderedEvents
from holdfast.tools.live.asking import ask
from holdfast.tools.live.fold import Fold
from holdfast.tools.metrics.families import PREFIX, MetricSample
from holdfast.tools.metrics.status_samples import status_samples
from holdfast.tools.metrics.tally import EventTally
from holdfast.tools.show.node_status import NodeStatus


class MetricsReader:
    """Reads events and asks nodes; `samples` returns those of the last `refresh` at once.

    ``nodes`` asks the nodes of a run directory. Raises ``NotFoundError`` if there is none.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        nodes: Callable[[Path], list[NodeStatus]] = ask,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir, self._nodes, self._now = run_dir, nodes, now
        self._events = OrderedEvents(run_dir)
        self._tally, self._fold = EventTally(), Fold()
        self._samples: list[MetricSample] = []

    @property
    def over(self) -> bool:
        """True once the job has ended."""
        return self._events.over

    def begin(self) -> None:
        """Read what is there, then refresh."""
        for events in self._events.history():
            self._take(events)
        self.refresh()

    def refresh(self) -> None:
        """Read what appeared, ask the nodes, and replace the samples."""
        self._take(self._events.new())
        self._samples = [*self._tally.samples(), *self._of_nodes(), *self._of_course()]

    def samples(self) -> list[MetricSample]:
        """Return the newest samples."""
        return self._samples

    def _take(self, events: list[Event]) -> None:
        self._tally.add(events)
        self._fold.apply(events)

    def _of_nodes(self) -> list[MetricSample]:
        if self.over:
            return []
        try:
            return status_samples(self._nodes(self._run_dir))
        except (HoldfastError, OSError, ValueError):
            return []  # the job starts or ends, or no sidecar answers: then no node is up

    def _of_course(self) -> list[MetricSample]:
        now_s = self._now()
        found = [
            MetricSample(PREFIX + "read_timestamp_seconds", (), now_s),
            MetricSample(PREFIX + "read_errors_total", (), float(self._events.damaged)),
        ]
        view = self._fold.view(now_s=now_s)
        if not view.step:
            return found
        found.append(MetricSample(PREFIX + "goodput_ratio", (), view.goodput))
        for use, seconds in view.shares.items():
            found.append(MetricSample(PREFIX + "time_seconds", (use.replace(" ", "_"),), seconds))
        return found
