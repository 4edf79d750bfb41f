"""Of all due checkpoints one is written, and the newest of the others waits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.ckpt.sidecar.persist.queue import BeginWriting, Complete, Decision, Queue, Skip

RANKS = 2
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("due"), st.integers(0, 12)),
        st.tuples(st.just("receive"), st.integers(0, 12), st.integers(0, RANKS - 1)),
        st.tuples(st.just("end"), st.integers(0, 12)),
    ),
    max_size=80,
)


def apply(queue: Queue, event: tuple[object, ...]) -> list[Decision]:
    key = (1, int(str(event[1])))
    match event[0]:
        case "due":
            return queue.due(key, ranks=RANKS)
        case "receive":
            return queue.receive(key, int(str(event[2])), "receipt")
        case _:
            return queue.end(key)


@given(EVENTS)
def test_one_is_written_one_waits_and_none_is_forgotten(events: list[tuple[object, ...]]) -> None:
    queue = Queue()
    due, begun, skipped, ended, complete = set(), [], [], set(), []
    for event in events:
        key = (1, int(str(event[1])))
        if event[0] == "due" and key not in ended:
            due.add(key)
        if event[0] == "end":
            ended.add(key)
        for decision in apply(queue, event):
            match decision:
                case BeginWriting(key=which):
                    begun.append(which)
                case Skip(key=which, newer=newer):
                    assert newer > which
                    skipped.append(which)
                case Complete(key=which, receipts=receipts):
                    assert len(receipts) == RANKS
                    complete.append(which)
        present = {each for each in (queue.active, queue.waiting) if each}
        assert due - ended - set(skipped) <= present
        assert queue.active not in (*skipped, *ended)
        assert queue.waiting is None or queue.active is not None
        assert set(complete) <= set(begun)
    assert len(begun) == len(set(begun))
    assert len(complete) == len(set(complete))
    assert not set(begun) & set(skipped)


def test_the_newest_waits_and_begins_when_the_one_before_has_ended() -> None:
    queue = Queue()
    assert queue.due((1, 10), ranks=1) == [BeginWriting(key=(1, 10))]
    assert queue.due((1, 20), ranks=1) == []
    assert queue.due((1, 30), ranks=1) == [Skip(key=(1, 20), newer=(1, 30))]
    assert queue.receive((1, 10), 0, "a") == [Complete(key=(1, 10), receipts=("a",))]
    assert queue.end((1, 10)) == [BeginWriting(key=(1, 30))]
    assert queue.end((1, 10)) == []
    assert queue.due((1, 10), ranks=1) == []


def test_packs_that_are_there_already_count() -> None:
    queue = Queue()
    decisions = queue.due((1, 10), ranks=2, receipts={1: "b", 0: "a"})
    assert decisions == [BeginWriting(key=(1, 10)), Complete(key=(1, 10), receipts=("a", "b"))]
