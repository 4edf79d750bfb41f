"""Views that are updated by changes decide the same as views built from all entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
from doubles.strategies import views
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.ckpt.memory.records import SnapshotWorld
from holdfast.elastic.coordinator.base import Entry, EventKind, KeyEvent
from holdfast.elastic.decisions import agree, seating, validity
from holdfast.elastic.membership.readiness import ready_trainers
from holdfast.elastic.membership.records import GenerationRecord, JobSpec, NodeRecord
from holdfast.elastic.membership.view import JobView, encode, generation_key, node_key, seating_key
from holdfast.elastic.planning.plan import changes, plan
from holdfast.elastic.planning.reach import all_asked, left_out, parted

broadly = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
WANTED = {"trainer": 3, "rollout": 1}


def written(view: JobView, *, spec: JobSpec | None) -> dict[str, str]:
    """Return the records of a view as the coordinator has them; ``spec`` is that of one worker."""
    found = {}
    for name, node in view.nodes.items():
        if spec is not None and node.workers:
            other = msgspec.structs.replace(node.workers[0], spec=spec)
            node = msgspec.structs.replace(node, workers=(other, *node.workers[1:]))  # noqa: PLW2901
        found[node_key("run", name)] = encode(node)
    if view.generation is not None:
        found[generation_key("run")] = encode(view.generation)
    if view.seating:
        found[seating_key("run")] = encode(view.seating)
    return found


def agreeing(records: dict[str, str]) -> dict[str, str]:
    """Return the records with no inventory that knows another group of a generation than others.

    There is one of each: what is put together from several views may name two.
    """
    found, groups = dict(records), dict[int, SnapshotWorld]()
    if (text := records.get(generation_key("run"))) is not None:
        record = msgspec.json.decode(text, type=GenerationRecord)
        groups[record.number] = record.snapshots
    for key, text in sorted(records.items()):
        if not key.startswith(node_key("run", "")):
            continue
        node = msgspec.json.decode(text, type=NodeRecord)
        worlds = node.inventory.worlds if node.inventory else ()
        if all(groups.setdefault(world.generation, world) == world for world in worlds):
            continue
        found[key] = encode(msgspec.structs.replace(node, inventory=None))
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, str]]:
    """Draw what a coordinator holds at a few moments: mostly as before, some of it replaced."""
    moments: list[dict[str, str]] = []
    drawn = views(plannable=True) | views() | views(plannable=True, cuts=True)
    for view in draw(st.lists(drawn, min_size=2, max_size=4)):
        spec = draw(st.sampled_from((None, None, None, JobSpec(parity=2))))
        now = written(view, spec=spec)
        if moments:
            kept = draw(st.sets(st.sampled_from(sorted({*moments[-1], *now} or {""}))))
            now = {k: v for k, v in now.items() if k not in kept} | {
                key: value for key, value in moments[-1].items() if key in kept
            }
        moments.append(agreeing(now))
    return moments


def events_between(
    before: Mapping[str, str], now: Mapping[str, str], *, revision: int
) -> list[KeyEvent]:
    gone = [(EventKind.DELETE, key, "") for key in before if key not in now]
    put = [(EventKind.PUT, key, text) for key, text in now.items() if before.get(key) != text]
    return [
        KeyEvent(kind=kind, key=key, value=value, revision=revision + number)
        for number, (kind, key, value) in enumerate((*gone, *put))
    ]


def opinions(view: JobView, *, later_s: float) -> list[object]:
    """Return all that is decided from a view."""
    found: list[object] = [validity.faults(view), validity.is_stale(view), changes(view)]
    out = left_out(view)
    found += [parted(view), out, all_asked(view)]
    found += [ready_trainers(view), list(view.nodes), seating.pending_trainers(view)]
    for node in (*view.nodes, "stranger"):
        seen = agree.observe(view, agree.FirstSeen(), now_s=0.0)
        seen = agree.observe(view, seen, now_s=later_s)
        found.append(agree.decide(view, seen, node=node, now_s=later_s))
    found.append(seating.seat(view, progress=1))
    if any(node.node not in out for node, _ in ready_trainers(view)):
        found.append(plan(view))
    return found


@broadly
@given(histories(), st.floats(0, 100), st.sets(st.integers(0, 3)))
def test_a_view_that_followed_another_decides_as_one_made_anew(
    moments: Sequence[dict[str, str]], later_s: float, looked_at: set[int]
) -> None:
    view = JobView(run="run", nodes={}, wanted=WANTED)
    known: Mapping[str, str] = {}
    revisions: dict[str, int] = {}
    for number, now in enumerate(moments):
        events = events_between(known, now, revision=1000 * (number + 1))
        revisions |= {event.key: event.revision for event in events}
        view, known = view.after(events, revision=number), now
        entries = [Entry(key=k, value=v, revision=revisions[k]) for k, v in sorted(now.items())]
        anew = JobView.from_entries(entries, run="run", wanted=WANTED, revision=number)
        assert view == anew
        if number in looked_at or number == len(moments) - 1:  # others are passed over
            assert opinions(view, later_s=later_s) == opinions(anew, later_s=later_s)


@broadly
@given(histories(), st.floats(0, 100))
def test_a_range_read_again_decides_as_one_read_for_the_first_time(
    moments: Sequence[dict[str, str]], later_s: float
) -> None:
    view = JobView(run="run", nodes={}, wanted=WANTED)
    for number, now in enumerate(moments):
        entries = [Entry(key=k, value=v, revision=hash(v)) for k, v in sorted(now.items())]
        view = JobView.from_entries(entries, run="run", wanted=WANTED, revision=number, before=view)
        anew = JobView.from_entries(entries, run="run", wanted=WANTED, revision=number)
        assert opinions(view, later_s=later_s) == opinions(anew, later_s=later_s)


@broadly
@given(views(plannable=True) | views(plannable=True, cuts=True), st.data())
def test_what_was_found_of_a_view_is_not_taken_for_another_made_of_it(
    view: JobView, data: st.DataObject
) -> None:
    opinions(view, later_s=1.0)
    gone = data.draw(st.sampled_from([*view.nodes, ""]))
    nodes = {name: node for name, node in view.nodes.items() if name != gone}
    other = dataclasses.replace(view, nodes=nodes)
    anew = JobView(
        run=view.run,
        nodes=nodes,
        wanted=view.wanted,
        generation=view.generation,
        generation_revision=view.generation_revision,
        seating=view.seating,
        seating_revision=view.seating_revision,
    )
    assert opinions(other, later_s=1.0) == opinions(anew, later_s=1.0)
