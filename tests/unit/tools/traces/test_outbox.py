"""The way of spans to a collector: resources, batches, a bounded queue, patience."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from holdfast.tools.traces.outbox import BATCH, SpanOutbox
from holdfast.tools.traces.spans import ROOT, SpanMark, Teller, TraceSpan, span_number, trace_number

WORKER = Teller(node="n0", role="trainer", seat="trainer/0", pid=41)


def span(key: str = ROOT, *, parent: str = "", error: str = "") -> TraceSpan:
    return TraceSpan(
        run="r-1",
        trace="generation 2",
        key=key,
        parent=parent,
        name="recovery",
        start_s=1.5,
        end_s=2.0,
        teller=WORKER,
        about={"holdfast.generation": 2},
        marks=(SpanMark(name="exit", time_s=1.75),),
        links=("generation 1",),
        error=error,
    )


class Refusing(SpanExporter):
    """An exporter whose collector takes nothing until ``takes`` is set."""

    def __init__(self) -> None:
        self.takes, self.tries, self.got = False, 0, 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.tries += 1
        self.got += len(spans) * self.takes
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE


def test_a_span_keeps_its_numbers_times_links_and_process() -> None:
    exporter = InMemorySpanExporter()
    outbox = SpanOutbox(exporter)
    outbox.add([span(), span("restore", parent=ROOT, error="it is gone")])
    assert outbox.send()
    root, restore = exporter.get_finished_spans()
    assert root.context.trace_id == trace_number("r-1", "generation 2")
    assert root.context.span_id == span_number("r-1", "generation 2", ROOT)
    assert root.parent is None
    assert restore.parent is not None
    assert restore.parent.span_id == root.context.span_id
    assert restore.context.trace_id == root.context.trace_id
    assert (root.start_time, root.end_time) == (1_500_000_000, 2_000_000_000)
    assert dict(root.attributes or {}) == {"holdfast.generation": 2}
    assert [(event.name, event.timestamp) for event in root.events] == [("exit", 1_750_000_000)]
    assert [link.context.trace_id for link in root.links] == [trace_number("r-1", "generation 1")]
    assert root.status.status_code == StatusCode.UNSET
    assert (restore.status.status_code, restore.status.description) == (
        StatusCode.ERROR,
        "it is gone",
    )
    assert {
        "service.name": "holdfast",
        "service.instance.id": "n0/trainer/0",
        "holdfast.node": "n0",
        "holdfast.role": "trainer",
        "process.pid": 41,
    }.items() <= dict(root.resource.attributes).items()


def test_spans_are_sent_in_batches() -> None:
    exporter = Refusing()
    exporter.takes = True
    outbox = SpanOutbox(exporter)
    outbox.add(span(str(number)) for number in range(2 * BATCH + 1))
    assert outbox.send()
    assert (exporter.tries, exporter.got, outbox.sent) == (3, 2 * BATCH + 1, 2 * BATCH + 1)


def test_a_collector_that_refuses_is_not_asked_again_at_once_and_nothing_is_lost() -> None:
    exporter = Refusing()
    outbox = SpanOutbox(exporter)
    outbox.add([span()])
    assert not outbox.send()
    assert not outbox.send()
    assert (exporter.tries, outbox.failing, len(outbox)) == (1, True, 1)
    exporter.takes = True
    outbox.close(within_s=5.0)
    assert (outbox.sent, outbox.dropped) == (1, 0)


def test_the_queue_is_bounded_and_the_oldest_give_way() -> None:
    exporter = Refusing()
    outbox = SpanOutbox(exporter, most=10)
    outbox.add(span(str(number)) for number in range(25))
    assert (len(outbox), outbox.dropped) == (10, 15)
    outbox.close(within_s=0.1)
    assert (len(outbox), outbox.dropped) == (0, 25)
