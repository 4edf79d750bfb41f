"""The stack of a stuck process, also if it answers no signal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import holdfast
from holdfast.elastic.agent import stacks
from holdfast.elastic.agent.stacks import MAX_TEXT, StackProbe, Stacks

_LISTENS = (
    "import faulthandler,sys,threading,time;"
    "from holdfast.elastic.channel.base import STACK_SIGNAL as s;"
    "faulthandler.register(s, file=int(sys.argv[1]), all_threads=True);"
)
_DEAF = "import signal,sys,time; signal.signal(signal.SIGRTMIN + 11, signal.SIG_IGN);"
_STUCK = "\ndef stuck():\n    print(flush=True)\n    time.sleep(1000)\nstuck()"


@contextmanager
def process(code: str, fd: int) -> Iterator[subprocess.Popen[bytes]]:
    found = subprocess.Popen(
        [sys.executable, "-c", code, str(fd)], pass_fds=(fd,), stdout=subprocess.PIPE
    )
    try:
        assert found.stdout is not None
        found.stdout.readline()
        yield found
    finally:
        found.kill()
        found.communicate()


def probe(code: str) -> Stacks:
    fd = os.memfd_create("stacks")
    try:
        with process(code, fd) as child:
            stack_probe = StackProbe(child.pid, fd=fd)
            while (answer := stack_probe.poll()) is None:
                time.sleep(0.005)
            return answer
    finally:
        os.close(fd)


def test_the_main_thread_comes_first() -> None:
    other = "threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()\n"
    found = probe(_LISTENS + other + _STUCK)
    assert found.how == "faulthandler"
    assert found.at.endswith("in stuck")
    assert found.text.count("Thread 0x") + found.text.count("Current thread") == 1 + 1
    assert "<lambda>" in found.text
    assert found.kernel[0] in "RS"


def test_a_process_that_answers_no_signal_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_spy", lambda pid: None)
    found = probe(_DEAF + _STUCK)
    assert (found.how, found.at, found.text) == ("none", "", "")
    assert found.kernel[0] in "RS", "its state is known all the same"


def test_another_program_is_asked_where_the_process_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = 'Thread 9: "reader"\n    read (io.py:1)\n\nThread 7: "MainThread"\n    stuck (x.py:3)'
    monkeypatch.setattr(
        stacks, "_spy", lambda pid: subprocess.Popen(["echo", said], stdout=subprocess.PIPE)
    )
    found = probe(_DEAF + _STUCK)
    assert (found.how, found.at) == ("py-spy", "stuck (x.py:3)")


def test_long_stacks_are_cut_behind_the_main_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "\n".join(["    deep (x.py:2)"] * 90)
    blocks = [f'Thread {i}: "Thread-{i}"\n{deep}' for i in range(20)]
    said = "\n\n".join([*blocks, 'Thread 99: "MainThread"\n    stuck (x.py:3)'])
    assert len(said) > 2 * MAX_TEXT
    monkeypatch.setattr(
        stacks, "_spy", lambda pid: subprocess.Popen(["echo", said], stdout=subprocess.PIPE)
    )
    found = probe(_DEAF + _STUCK)
    assert len(found.text) == MAX_TEXT
    assert "stuck (x.py:3)" in found.text[:200]


def test_the_state_of_a_process_that_is_gone_is_empty() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert stacks.kernel_state(child.pid) == ""


STACK = """Current thread 0x1 (most recent call first):
  File "{package}/elastic/groups/collectives.py", line 186 in await_work
  File "/venv/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/venv/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/train.py", line 13 in train
  File "{package}/elastic/loop/generations.py", line 260 in _enter
  File "/home/me/train.py", line 21 in <module>

Thread 0x2 (most recent call first):
  File "/home/me/other.py", line 1 in elsewhere"""


@pytest.mark.parametrize(
    ("inner", "place"),
    [
        ("", "dist.barrier at train.py:13"),
        ('  File "{package}/elastic/loop/run.py", line 5 in _end_pass\n'
         '  File "{package}/elastic/loop/run.py", line 9 in microbatches\n',
         "run.microbatches at train.py:13"),
        ('  File "{package}/elastic/loop/run.py", line 5 in _finish\n', "the end of the function"),
        ('  File "/home/me/model.py", line 3 in forward\n', "forward at model.py:3"),
        ('  File "/venv/site-packages/torch/distributed/tensor/_api.py", line 7 in redistribute\n'
         '  File "/venv/site-packages/torch/distributed/tensor/_api.py", line 9 in full_tensor\n',
         "DTensor.full_tensor at train.py:13"),
        ('  File "/venv/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", '
         'line 7 in _pre_forward\n'
         '  File "/venv/site-packages/torch/nn/modules/module.py", line 9 in inner\n',
         "a module under fully_shard at train.py:13"),
    ],
)  # fmt: skip
def test_a_place_is_the_users_call_that_waits(inner: str, place: str) -> None:
    package = next(iter(holdfast.__path__))
    stack = STACK
    if inner:
        lines = STACK.splitlines(keepends=True)
        stack = "".join([*lines[:2], inner, *lines[4:]])
    assert stacks.stand_of(stack.format(package=package)) == place


def test_a_stack_without_the_users_code_has_no_place() -> None:
    assert stacks.stand_of("") == stacks.stand_of("Thread 9: x\n    read (io.py:1)") == ""
