"""Descriptors with numbers above 1023, and none left at all."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast.ckpt.descriptors import allow_many, are_free, patiently, readable
from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.transport import Client, RunKey
from holdfast.elastic.processes.children import Child, end_processes


@pytest.fixture
def many() -> Iterator[None]:
    """Hold so many descriptors that every further one has a large number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("the hard limit of descriptors is too low")
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    yield
    for fd in descriptors:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many")
def test_what_can_be_read_is_found_whatever_its_number() -> None:
    first, second = os.pipe(), os.pipe()
    try:
        assert readable([first[0], second[0]], 0.0) == []
        os.write(second[1], b"x")
        assert readable([first[0], second[0]], 5.0) == [second[0]]
        os.close(first[1])
        assert readable([first[0]], 5.0) == [first[0]]
    finally:
        for fd in (first[0], *second):
            os.close(fd)


@pytest.mark.usefixtures("many")
def test_children_are_waited_for_and_ended() -> None:
    child = Child.start(["sleep", "600"], env=os.environ, tied=False)
    assert child.wait(0.01) is None
    assert end_processes([child.pid], mark="sleep") == []
    assert child.await_end(5.0)
    assert child.wait(5.0) == -9


def test_waiting_for_nothing_ends_in_time() -> None:
    start_s = time.monotonic()
    assert readable([], 0.02) == []
    assert time.monotonic() - start_s >= 0.02


@pytest.fixture
def give_back() -> Iterator[Callable[[], None]]:
    """Leave no descriptor free until the test calls this."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_needs_a_descriptor_is_repeated_until_one_is_free(
    give_back: Callable[[], None],
) -> None:
    assert not are_free(1)
    with pytest.raises(OSError, match="Too many open files"):
        patiently(lambda: os.dup(0), wait_s=0.1)
    threading.Timer(0.1, give_back).start()
    os.close(patiently(lambda: os.dup(0)))
    assert are_free(10)
    with pytest.raises(FileNotFoundError):
        patiently(lambda: os.open("/nowhere", os.O_RDONLY))


def test_a_child_starts_when_descriptors_are_free_again(give_back: Callable[[], None]) -> None:
    threading.Timer(0.1, give_back).start()
    child = Child.start(["true"], env=os.environ, tied=False)
    assert child.wait(60) == 0


def test_a_client_without_descriptors_is_an_error_and_not_the_end_of_the_process(
    give_back: Callable[[], None],
) -> None:
    for free in range(12):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with pytest.raises(PeerError, match="too few descriptors are left"):
            Client("tcp://127.0.0.1:9", RunKey.new())
        if free < 11:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 1, hard))
    give_back()
    Client("tcp://127.0.0.1:9", RunKey.new()).close()
