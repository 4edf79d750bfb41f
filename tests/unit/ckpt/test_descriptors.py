"""Descriptors with numbers above 1023."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator

import pytest

from holdfast.ckpt.descriptors import allow_many, readable
from holdfast.elastic.processes.children import Child, end_processes


@pytest.fixture
def many() -> Iterator[None]:
    """Hold so many descriptors that every further one has a large number."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_many()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1200:
        pytest.skip("the hard limit of descriptors is too low")
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1030)]
    yield
    for fd in held:
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
