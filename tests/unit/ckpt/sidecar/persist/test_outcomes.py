"""The outcomes of checkpoints that a sidecar remembers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from doubles.sizes import deep_bytes

from holdfast.ckpt.sidecar.core.core import Core
from holdfast.ckpt.sidecar.core.messages import Durable
from holdfast.ckpt.sidecar.persist.outcomes import Outcomes

KEPT = 1000


def outcomes_after(steps: int, *, error: str | None) -> Outcomes:
    found = Outcomes(cast("Core", SimpleNamespace(durable=-1)))
    for step in range(steps):
        found.skip(step)
        found.note(Durable(generation=1, step=step, error=error and f"{error} of step {step}"))
    return found


def size_of(outcomes: Outcomes) -> int:
    return deep_bytes([outcomes._errors, outcomes._persisted, outcomes._skipped])


def test_a_store_that_is_away_for_a_month_fills_no_memory() -> None:
    newest, later = outcomes_after(2 * KEPT, error="no route"), outcomes_after(9 * KEPT, error="no")
    assert size_of(later) <= size_of(newest)
    status: dict[str, Any] = newest.status()
    assert status["persist_error"] == f"no route of step {2 * KEPT - 1}"
    assert newest.failed_in_a_row == 2 * KEPT
    assert newest.has_failed(2 * KEPT - 1)
    assert not newest.has_failed(KEPT - 1)


def test_a_step_that_fails_again_is_remembered_as_the_newest() -> None:
    found = outcomes_after(KEPT, error="no route")
    found.note(Durable(generation=2, step=0, error="again"))
    found.note(Durable(generation=2, step=KEPT, error="no route"))
    assert found.has_failed(0)
    assert not found.has_failed(1)


def test_steps_that_are_saved_for_a_month_fill_no_memory() -> None:
    assert size_of(outcomes_after(9 * KEPT, error=None)) <= size_of(
        outcomes_after(2 * KEPT, error=None)
    )
