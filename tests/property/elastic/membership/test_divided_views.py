"""Generations that are planned one after the other are told as differences, and read the same."""

from __future__ import annotations

from doubles.strategies import seatings, views
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.elastic.membership.differences import difference_text, with_difference
from holdfast.elastic.membership.readiness import ready_trainers
from holdfast.elastic.membership.records import GenerationRecord, Seating
from holdfast.elastic.membership.stretches import joined, stretches
from holdfast.elastic.membership.view import JobView
from holdfast.elastic.planning.plan import plan
from holdfast.elastic.planning.reach import left_out

broadly = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def planned(view: JobView) -> GenerationRecord | None:
    """Return the next generation of a view, None if it has no trainer for one."""
    out = left_out(view)
    return plan(view)[0] if any(node.node not in out for node, _ in ready_trainers(view)) else None


@broadly
@given(views(plannable=True), views(plannable=True))
def test_any_planned_generation_is_told_from_the_one_before_or_from_another(
    view: JobView, other: JobView
) -> None:
    record = planned(view)
    for before in (view.generation, planned(other)):
        if record is not None and before is not None:
            text = difference_text(record, before)
            assert text is not None, "the planner makes nothing that a difference cannot tell"
            assert with_difference(text, before) == record


@broadly
@given(seatings(), seatings())
def test_any_seating_is_told_from_another(
    seats: tuple[Seating, ...], before: tuple[Seating, ...]
) -> None:
    text = difference_text(seats, before)
    assert text is not None
    assert with_difference(text, before) == seats


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 5)))
def test_any_sequence_comes_back_from_stretches_of_another(old: list[int], new: list[int]) -> None:
    assert joined(old, stretches(old, new)) == new
