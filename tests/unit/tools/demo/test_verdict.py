"""The demo's verdict: correct runs pass, and every kind of failure is named."""

from typing import Any

import msgspec
import pytest
from synthetic_run import hurt_job

from holdfast.elastic.events import RolloutRecovered, WorkerExited
from holdfast.tools.demo.verdict import Evidence, first_difference, judge
from holdfast.tools.report import timeline


def result(**changes: Any) -> dict[str, Any]:
    ledger = {"ok": True, "violations": [], "ordinals": {"pending": 0, "trained": 144}}
    return {
        "final_hash": "abc",
        "reward": [0.1, 0.2],
        "heldout": [[0, 0.2], [18, 0.5]],
        "ledger": ledger,
        "steps": 18,
        **changes,
    }


def evidence(**changes: Any) -> Evidence:
    events = hurt_job()
    begin = events[0].time_s
    whole = Evidence(
        hurt=result(),
        reference=result(),
        events=events,
        timeline=timeline.build(events),
        steps=18,
        ordinals=144,
        kills_pending=0,
        killed_pids=frozenset({101, 102}),
        leftovers=[],
        must_learn=True,
    )
    if changes.pop("a_survivor_exits", False):
        exited = WorkerExited(
            time_s=begin + 10.0, node="a", seat="rollout/1", pid=103, status="exit status 1"
        )
        changes["events"] = [*events, exited]
    return msgspec.structs.replace(whole, **changes)


def test_a_demo_that_held_passes_every_check() -> None:
    verdict, failures = judge(evidence())
    assert failures == []
    assert all(verdict.values())
    assert {"exact", "ledger_ok", "learned"} <= verdict.keys()


@pytest.mark.parametrize(
    ("changes", "check", "message"),
    [
        ({"hurt": result(final_hash="abd")}, "exact", "abd"),
        ({"hurt": result(reward=[0.1, 0.3])}, "exact", "reward differs from entry 1"),
        (
            {"hurt": result(ledger={"ok": False, "violations": ["twice"], "ordinals": {}})},
            "ledger_ok",
            "twice",
        ),
        (
            {
                "reference": result(
                    ledger={"ok": True, "violations": [], "ordinals": {"trained": 143, "ready": 1}}
                )
            },
            "ledger_ok",
            "needed: all 144",
        ),
        ({"hurt": result(steps=17)}, "steps_ok", "17 of 18"),
        ({"kills_pending": 1}, "faults_ok", "1 planned kills"),
        ({"a_survivor_exits": True}, "survivors_ok", "rollout/1 (pid 103)"),
        ({"killed_pids": frozenset({102})}, "survivors_ok", "trainer/1 (pid 101)"),
        ({"leftovers": ["process 7: python"]}, "cleanup_ok", "process 7"),
        ({"hurt": result(heldout=[[0, 0.5], [18, 0.5]])}, "learned", "did not rise"),
    ],
)
def test_a_failed_check_is_called_by_name(
    changes: dict[str, Any], check: str, message: str
) -> None:
    verdict, failures = judge(evidence(**changes))
    assert not verdict[check]
    assert any(failure.startswith(f"{check}: ") and message in failure for failure in failures)


def test_a_kill_between_two_sequences_does_not_count() -> None:
    events = [
        msgspec.structs.replace(each, unfinished=0) if isinstance(each, RolloutRecovered) else each
        for each in hurt_job()
    ]
    verdict, failures = judge(evidence(events=events))
    assert not verdict["faults_ok"]
    assert "between two sequences" in failures[0]


def test_a_quick_demo_need_not_learn() -> None:
    assert "learned" not in judge(evidence(must_learn=False))[0]


def test_the_first_difference_of_unequal_lengths_is_the_shorter_end() -> None:
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [0, 2]) == 0
