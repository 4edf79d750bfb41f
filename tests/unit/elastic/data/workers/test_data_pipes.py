"""Queues between a rank and its workers: messages arrive, and a killed process blocks no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.elastic.data.workers.pipes import Flag, PipeQueue

WAIT_S = 30.0


def _open_memories() -> int:
    """Return how many open files of this process are memory shared by torch."""
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread closed it
            names.append(str(each.readlink()))
    return sum("/torch_" in name for name in names)


@pytest.fixture
def pipe() -> Iterator[PipeQueue]:
    made = PipeQueue()
    yield made
    made.shut()


def test_objects_arrive_in_order(pipe: PipeQueue) -> None:
    sent: list[Any] = [1, "two", b"3" * 300_000, None, {"four": [4.0]}]
    for item in sent:
        pipe.put(item)
    assert [pipe.get(timeout=WAIT_S) for _ in sent] == sent


def test_tensors_arrive_by_the_memory_they_lie_in(pipe: PipeQueue) -> None:
    tensors = [torch.arange(5) + i for i in range(450)]  # more than the kernel sends at once
    before = _open_memories()
    pipe.put(tensors)
    arrived = pipe.get(timeout=WAIT_S)
    assert all(torch.equal(*pair) for pair in zip(tensors, arrived, strict=True))
    arrived[3][0] = 99
    assert tensors[3][0] == 99
    del tensors, arrived
    assert _open_memories() <= before


def test_an_empty_queue_says_so_after_the_time_given(pipe: PipeQueue) -> None:
    with pytest.raises(queue.Empty):
        pipe.get(timeout=0.01)
    with pytest.raises(queue.Empty):
        pipe.get(block=False)


def test_who_waits_leaves_when_the_queue_is_shut(pipe: PipeQueue) -> None:
    left = threading.Event()

    def read() -> None:
        with pytest.raises(queue.Empty):
            pipe.get(timeout=WAIT_S)
        left.set()

    threading.Thread(target=read, daemon=True).start()
    pipe.shut()
    assert left.wait(WAIT_S)


def test_what_cannot_be_pickled_is_refused_where_it_is_put(pipe: PipeQueue) -> None:
    with pytest.raises((TypeError, AttributeError)):
        pipe.put([torch.ones(2), threading.Lock()])
    pipe.put("next")
    assert pipe.get(timeout=WAIT_S) == "next"


class Putting:
    """Puts something into a queue while it is pickled, as the finalizer of an iterator may."""

    def __init__(self, other: PipeQueue) -> None:
        self.other = other

    def __reduce__(self) -> Any:
        self.other.put("by the way")
        return str, ("put",)


def test_something_may_be_put_while_something_else_is_pickled(pipe: PipeQueue) -> None:
    other, flag = PipeQueue(), Flag()
    pipe.put([Putting(other), flag])
    said, same = pipe.get(timeout=WAIT_S)
    same.set()
    assert said == "put"
    assert flag.is_set()
    assert other.get(timeout=WAIT_S) == "by the way"
    other.shut()


def _fill(pipe: PipeQueue, size: int, times: int) -> None:
    for _ in range(times):
        pipe.put(b"x" * size)
    signal.pause()


def test_a_killed_writer_holds_no_lock() -> None:
    """It fills the socket, has the lock then, and is killed with it."""
    context = multiprocessing.get_context("spawn")
    pipe, flag = PipeQueue(), Flag()
    writer = context.Process(target=_fill, args=(pipe, 1 << 20, 3))
    writer.start()
    assert pipe.get(timeout=WAIT_S) == b"x" * (1 << 20)
    writer.kill()
    writer.join()
    pipe.put("mine")
    done = threading.Event()

    def read() -> None:  # what the killed one had begun comes first, and is no message
        seen = pipe._reader.recv(1 << 16)
        while b"mine" not in seen[-1000:]:
            seen = seen[-1000:] + pipe._reader.recv(1 << 16)
        done.set()

    threading.Thread(target=read, daemon=True).start()
    assert done.wait(WAIT_S)
    pipe.shut()
    assert not flag.is_set()


def _raise_flag(flag: Flag) -> None:
    flag.set()


def test_a_flag_is_seen_by_every_process() -> None:
    context = multiprocessing.get_context("spawn")
    flag = Flag()
    other = context.Process(target=_raise_flag, args=(flag,))
    other.start()
    other.join()
    assert flag.is_set()
