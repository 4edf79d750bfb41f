"""A death is detected when a process dies, long before the kernel has freed its memory."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tree import ROOT

from holdfast.elastic.processes.children import Child, ChildChange
from holdfast.elastic.processes.control_page import ControlPage
from holdfast.elastic.processes.lifelock import wait_status

DEADLINE_S = 60.0
HOLDER = """
import mmap, os, sys, threading, time
from holdfast.elastic.processes.control_page import ControlPage
page = ControlPage(int(sys.argv[1]))
page.hold_life()
for _ in range(3):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
memory = mmap.mmap(-1, int(sys.argv[2]))
for at in range(0, len(memory), 4096):
    memory[at] = 1
os.write(1, b"x")
{then}
"""


class Holder:
    """A process with much memory, and a thread that waits for its end."""

    def __init__(self, directory: Path, *, nbytes: int, then: str = "time.sleep(1000)") -> None:
        self.page = ControlPage.create("test")
        output = directory / "output"
        self.child = Child.start(
            [sys.executable, "-c", HOLDER.format(then=then), str(self.page.fd), str(nbytes)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            tied=False,
            output=output,
            pass_fds=(self.page.fd,),
        )
        deadline_s = time.monotonic() + DEADLINE_S
        while not (output.exists() and output.read_bytes()) or not self.page.life_is_held:
            assert time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.005)
        self.died: bool | None = None
        self.status: int | None = None
        self.waitable: bool | None = None
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        self.died = self.page.await_end()
        self.status = wait_status(self.child.pid)
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        self.waitable = os.waitid(os.P_PID, self.child.pid, look) is not None

    def close(self) -> None:
        self.thread.join(DEADLINE_S)
        self.child.kill()
        self.child.wait(DEADLINE_S)
        self.page.close()


def seen_before_the_memory_was_freed(directory: Path) -> bool:
    """Say if the death was noticed; the kernel is faster if the observer gets no processor."""
    directory.mkdir()
    holder = Holder(directory, nbytes=1 << 29)
    os.kill(holder.child.pid, signal.SIGKILL)
    holder.thread.join(DEADLINE_S)
    assert holder.died
    if holder.waitable or holder.status is None:
        holder.close()
        return False
    assert holder.status == signal.SIGKILL
    holder.child.foretell(os.waitstatus_to_exitcode(holder.status))
    status = holder.child.poll()
    assert status is not None
    assert (status.change, status.code) == (ChildChange.EXITED, -signal.SIGKILL)
    assert not holder.child.alive
    assert holder.child.poll() is None
    still_at_it = holder.child.wait(0.0) is None
    holder.child.bury()
    assert holder.child.wait(0.0) == -signal.SIGKILL
    holder.close()
    return still_at_it


def test_a_death_is_seen_before_the_memory_is_freed(tmp_path: Path) -> None:
    assert any(seen_before_the_memory_was_freed(tmp_path / f"{turn}") for turn in range(20))


@pytest.mark.parametrize(
    ("then", "status", "code"),
    [("os._exit(3)", 3 << 8, 3), ("sys.exit(0)", None, 0), ("os.abort()", None, -6)],
)
def test_other_ends_are_told_as_what_they_are(
    tmp_path: Path, then: str, status: int | None, code: int
) -> None:
    holder = Holder(tmp_path, nbytes=1 << 20, then=f"time.sleep(0.2); {then}")
    holder.thread.join(DEADLINE_S)
    assert holder.died
    if then != "os.abort()" and not holder.waitable:
        assert holder.status == status
    assert holder.child.wait(DEADLINE_S) == code
    holder.close()


def test_a_thread_that_ends_is_no_death(tmp_path: Path) -> None:
    page = ControlPage.create("test")
    thread = threading.Thread(target=page.hold_life)
    thread.start()
    thread.join()
    assert page.await_end()
    assert wait_status(os.getpid()) is None
    page.close()


def test_one_that_was_buried_before_anybody_looked_has_exited_all_the_same(tmp_path: Path) -> None:
    for look in ("poll", "wait"):
        directory = tmp_path / look
        directory.mkdir()
        holder = Holder(directory, nbytes=1 << 20)
        assert not holder.child.await_end(0.01), "it lives"
        os.kill(holder.child.pid, signal.SIGKILL)
        holder.thread.join(DEADLINE_S)
        holder.child.foretell(-signal.SIGKILL)
        assert holder.child.await_end(0.0)
        holder.child.bury()
        assert holder.child.await_end(0.0)
        if look == "poll":
            status = holder.child.poll()
            assert status is not None
            assert status.change is ChildChange.EXITED
        assert holder.child.wait(0.0) == -signal.SIGKILL
        holder.close()
