"""The log of finished work: found again where it is the same work, dropped when it is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from adapter_packages import needs
from own_loops import Logs

from holdfast.elastic.membership.records import Member

LOG = "completions-trainer-0"

pytestmark = needs("transformers", "accelerate", "safetensors")


def work_of(logs: Logs, *, node: str = "n0", seats: tuple[str, ...] = ("trainer/0",)) -> Any:
    """Return the work of a new process, and its run."""
    from holdfast.adapters.hf.grpo.finished import FinishedWork

    logs.node = node
    members = tuple(
        Member(rank=rank, seat=seat, node=node, incarnation="x") for rank, seat in enumerate(seats)
    )
    session = SimpleNamespace(members=members, sidecar=logs)
    protection = SimpleNamespace(step=0)
    run: Any = SimpleNamespace(
        rank=0, is_leader=True, completed=0, protection=protection, _session=session
    )
    return FinishedWork(run), run


def test_the_next_process_of_a_seat_finds_what_the_last_one_finished() -> None:
    logs = Logs()
    first, _ = work_of(logs)
    first.append("0/ab/chunk", b"done")
    again, _ = work_of(logs)
    assert again.found("0/ab/") == {"chunk": b"done"}
    assert again.found("0/cd/") == {}, "other weights"


def test_another_node_finds_the_work_of_one_that_is_gone() -> None:
    logs = Logs()
    first, _ = work_of(logs, node="n0")
    first.append("0/ab/chunk", b"done")
    other, _ = work_of(logs, node="n1", seats=("trainer/1",))
    assert other.found("0/ab/") == {}
    other, run = work_of(logs, node="n1", seats=("trainer/1",))
    other.inherit(first.writers)
    assert other.found("0/ab/") == {"chunk": b"done"}
    assert not other.is_over, "a restore may go back to step 0"
    run.protection.step = 1
    assert other.is_over
    other.forget_lost()
    assert (logs.dropped, other.writers) == ([LOG], other.present)
    assert not other.is_over


def test_work_of_two_rounds_that_are_repeated_is_found_though_the_logs_are_read_once() -> None:
    logs = Logs()
    first, run = work_of(logs)
    for run.completed in (0, 4):
        first.append(f"{run.completed}/ab/chunk", b"done")
    again, _ = work_of(logs)
    assert again.found("0/ab/") == {"chunk": b"done"}
    logs.records.clear()
    assert again.found("4/ab/") == {"chunk": b"done"}


def test_records_of_steps_before_the_restore_point_are_dropped() -> None:
    from holdfast.adapters.hf.grpo.records import join

    logs = Logs()
    work, run = work_of(logs)
    work.append("0/ab/x", b"1")
    run.completed = 4
    work.append("4/ab/x", b"2")
    assert set(join(logs.log_read(LOG, node="n0"))) == {"0/ab/x", "4/ab/x"}
    run.completed, run.protection.step = 8, 4
    work.append("8/ab/x", b"3")
    found = set(join(logs.log_read(LOG, node="n0")))
    assert found == {"4/ab/x", "8/ab/x"}, "a restore may go back to step 4"


def test_work_goes_on_without_memory_for_its_log(caplog: Any) -> None:
    from holdfast.ckpt import CapacityError

    logs = Logs()
    work, _ = work_of(logs)

    def full(*_: Any) -> int:
        raise CapacityError("full")

    logs.log_append = full  # type: ignore[method-assign]
    work.append("0/ab/x", b"1")
    work.append("0/ab/y", b"1")
    assert caplog.text.count("sampled without a log") == 1
