"""Nodes with termination notices leave one after the other, each when its last step is safe."""

from __future__ import annotations

import msgspec
import pytest
from doubles import fakes

from holdfast.elastic.agent.notice import NoticeConfig
from holdfast.elastic.decisions.leaving import (
    LINGER_S,
    RUSH_S,
    SETTLE_S,
    HandOver,
    Leave,
    Stay,
    depart,
    place,
)
from holdfast.elastic.membership.view import JobView

LONG_S = 100.0


def view(*members: str, **leaving: int) -> JobView:
    """Nodes a, b and c, of which those named train."""
    nodes = [
        msgspec.structs.replace(fakes.node(name), leaving=leaving.get(name, 0)) for name in "abc"
    ]
    ranks = [(name, fakes.worker(f"t/{name}", incarnation=f"{name}-worker")) for name in members]
    return fakes.view(*nodes, generation=fakes.generation(1, nodes, ranks=ranks))


def ask(
    at: JobView, node: str, *handed: str, since_s: float = LONG_S, due_s: float = LONG_S
) -> type:
    decision, reason = depart(at, node=node, handed=handed, since_s=since_s, due_s=due_s)
    assert reason
    return type(decision)


def test_it_leaves_when_its_trainers_have_handed_over() -> None:
    at = view("a", "b", a=1)
    assert ask(at, "a") is HandOver
    assert ask(at, "a", "b-worker") is HandOver
    assert ask(at, "a", "a-worker") is Leave


def test_nodes_leave_one_after_the_other() -> None:
    at = view("a", "b", "c", a=2, b=1, c=1)
    assert [ask(at, node) for node in "abc"] == [Stay, HandOver, Stay]
    assert ask(at, "a", due_s=RUSH_S) is HandOver, "its time is nearly up"
    assert place(at) == 3
    assert place(view("a")) == 1


def test_it_waits_a_moment_for_others_that_were_told_at_the_same_time() -> None:
    at = view("a", "b", b=1)
    assert ask(at, "b", since_s=SETTLE_S / 2) is Stay
    assert ask(at, "b", since_s=SETTLE_S) is HandOver


def test_it_leaves_when_the_time_is_up_or_nobody_there_trains() -> None:
    at = view("a", "b", a=1)
    assert ask(at, "a", due_s=0.0) is Leave
    assert ask(at, "c", since_s=0.0) is Leave


def test_workers_that_do_not_train_have_a_moment_to_hand_over() -> None:
    at = view("a", "b", a=1, c=1)

    def decision(node: str, *handed: str, since_s: float, due_s: float = LONG_S) -> type:
        found, reason = depart(at, node=node, handed=handed, since_s=since_s, due_s=due_s, others=2)
        assert reason
        return type(found)

    assert decision("c", since_s=0.0) is Stay
    assert decision("c", since_s=LINGER_S) is Leave
    assert decision("c", since_s=0.0, due_s=RUSH_S) is Leave
    assert decision("a", since_s=SETTLE_S) is HandOver, "its trainers need not wait for them"
    assert decision("a", "a-worker", since_s=SETTLE_S) is Stay
    assert decision("a", "a-worker", since_s=LINGER_S) is Leave


@pytest.mark.parametrize("wrong", [{"every_s": 0.0}, {"grace_s": -1.0}, {"url": "file:///etc"}])
def test_notices_are_configured_right(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NoticeConfig(**wrong)  # type: ignore[arg-type]
