"""Spans on their way to a collector: a bounded queue that keeps them while it does not answer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from holdfast.tools.traces.spans import ROOT, SpanMark, Teller, TraceSpan, span_number, trace_number

MOST_SPANS: Final = 8192
BATCH: Final = 256
_TIMEOUT_S: Final = 5.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0


class SpanOutbox:
    """Sends spans in batches. While the collector refuses, the oldest give way to new ones.

    ``dropped`` counts spans that were never sent; ``failing`` is True while the last attempt
    failed.
    """

    def __init__(self, exporter: SpanExporter, *, most: int = MOST_SPANS) -> None:
        self._exporter, self._most = exporter, most
        self._waiting: deque[ReadableSpan] = deque()
        self._wait_s, self._again_s = _FIRST_WAIT_S, 0.0
        self.sent = self.dropped = 0
        self.failing = False

    def add(self, spans: Iterable[TraceSpan]) -> None:
        """Queue spans."""
        for span in spans:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(readable_span(span))

    def __len__(self) -> int:
        """Return how many spans wait."""
        return len(self._waiting)

    def send(self, *, within_s: float = float("inf")) -> bool:
        """Send what waits, for as long as the collector takes it; return whether all is sent.

        After a failure nothing is tried for a while, which doubles each time.
        """
        deadline_s = time.monotonic() + within_s
        while self._waiting and self._again_s <= time.monotonic() < deadline_s:
            batch = [self._waiting[at] for at in range(min(BATCH, len(self._waiting)))]
            self.failing = self._exporter.export(batch) != SpanExportResult.SUCCESS
            if self.failing:
                self._again_s = time.monotonic() + self._wait_s
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
                break
            self._wait_s, self.sent = _FIRST_WAIT_S, self.sent + len(batch)
            for _ in batch:
                self._waiting.popleft()
        return not self._waiting

    def close(self, *, within_s: float) -> None:
        """Try once more to send what waits, at most so long; the rest counts as dropped."""
        self._again_s = 0.0
        self.send(within_s=within_s)
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._exporter.shutdown()


def exporter_to(url: str) -> SpanExporter:
    """Return the exporter to a collector; headers come from OTEL_* variables."""
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the outbox tells failures
    return OTLPSpanExporter(endpoint=url, timeout=_TIMEOUT_S)


def readable_span(span: TraceSpan) -> ReadableSpan:
    """Return a span as the SDK's exporters take it."""
    error = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=_context(span, span.trace, span.key),
        parent=_context(span, span.trace, span.parent) if span.parent else None,
        resource=_resource(span.run, span.teller),
        attributes=span.about,
        events=tuple(map(_event, span.marks)),
        links=tuple(Link(_context(span, trace, ROOT)) for trace in span.links),
        kind=SpanKind.INTERNAL,
        status=error,
        start_time=_ns(span.start_s),
        end_time=_ns(span.end_s),
        instrumentation_scope=InstrumentationScope("holdfast"),
    )


def _context(span: TraceSpan, trace: str, key: str) -> SpanContext:
    return SpanContext(
        trace_id=trace_number(span.run, trace),
        span_id=span_number(span.run, trace, key),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _resource(run: str, teller: Teller) -> Resource:
    """Return the process as a resource: a pid only where the events tell it."""
    found: dict[str, str | int] = {
        "service.name": "holdfast",
        "service.namespace": run,
        "service.instance.id": "/".join(filter(None, (teller.node, teller.seat or teller.role))),
        "holdfast.run": run,
        "holdfast.node": teller.node,
        "holdfast.role": teller.role,
    }
    if teller.seat:
        found["holdfast.seat"] = teller.seat
    if teller.pid:
        found["process.pid"] = teller.pid
    return Resource(found)


def _event(mark: SpanMark) -> Event:
    return Event(mark.name, attributes=mark.about, timestamp=_ns(mark.time_s))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
