"""All traces of a job from its events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from holdfast.elastic.events import Event, JobEnded
from holdfast.tools.traces.checkpoints import CheckpointTraces
from holdfast.tools.traces.generations import GenerationTraces
from holdfast.tools.traces.joins import JoinTraces
from holdfast.tools.traces.spans import TraceSpan


class Traces:
    """The spans of a run, one event after the other; its memory does not grow with the run."""

    def __init__(self) -> None:
        self._parts = (GenerationTraces(), JoinTraces(), CheckpointTraces())
        self._newest_s = 0.0

    def add(self, events: Iterable[Event]) -> Iterator[TraceSpan]:
        """Yield the spans that new events complete, oldest first."""
        for event in events:
            self._newest_s = max(self._newest_s, event.time_s)
            if isinstance(event, JobEnded):
                yield from self.close()
            else:
                yield from chain.from_iterable(part.add(event) for part in self._parts)

    def close(self) -> Iterator[TraceSpan]:
        """Yield the spans that are not complete, with an error that says so."""
        for part in self._parts:
            yield from part.close(self._newest_s)
            # Traces that were handed on are forgotten, so a second end of the job repeats none.
        run = self._parts[0].run
        self._parts = (GenerationTraces(run), JoinTraces(run), CheckpointTraces(run))
