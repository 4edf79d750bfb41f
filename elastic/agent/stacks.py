"""The Python stacks of a stuck worker, read without stopping or tracing it.

In every worker `faulthandler` writes all stacks, on a signal, into a file shared with the agent.
This needs no right to trace processes, which containers rarely give. It works while the worker
holds the interpreter's lock inside a native call, because the handler is native as well. If nothing
is written, py-spy is tried if installed: it reads a stopped process's memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import holdfast
from holdfast.elastic.channel.base import STACK_SIGNAL
from holdfast.elastic.decisions.standing import SHARDED_MODULE

MAX_TEXT: Final = 16 << 10
"""Characters of the stacks that are kept; the main thread's come first."""

_FRAME: Final = re.compile(r'File "(.+)", line (\d+) in (.+)')
_LIBRARIES: Final = (
    *(f"{path}/" for path in holdfast.__path__),
    f"{sysconfig.get_path('stdlib')}/",
)
_WRAPPERS: Final = frozenset({"wrapper", "inner", "apply", "forward"})
_COLLECTIVES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/nn/functional.py",
)
_SHARDED: Final = "torch/distributed/tensor/_api.py"
_FULLY_SHARD: Final = "/torch/distributed/fsdp/"

_SIGNAL_S, _ALL_S = 0.2, 0.6
_QUIET_S = 0.08  # the handler marks no end: assume it when nothing more is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The result of a probe: ``at`` is the innermost frame of the main thread, ``text`` all stacks.

    ``how`` is ``faulthandler``, ``py-spy`` or ``none``; ``kernel`` is the process's state and its
    wait channel in the kernel (``"D nfs_wait"``), as far as they can be read.
    """

    how: str
    at: str
    text: str
    kernel: str


class StackProbe:
    """Requests one worker's stacks; `poll` returns them, or an empty result at the time limit.

    ``fd`` is the file that the worker's handler writes to.
    """

    def __init__(self, pid: int, *, fd: int) -> None:
        self._pid, self._fd = pid, fd
        self._from = self._seen = os.fstat(fd).st_size
        self._began_s = self._grew_s = time.monotonic()
        self._kernel = kernel_state(pid)
        self._spy: subprocess.Popen[bytes] | None = None
        self._spied = False
        os.kill(pid, STACK_SIGNAL)

    def poll(self) -> Stacks | None:
        """Return the result, None while more may come. Never blocks."""
        now_s = time.monotonic()
        since_s = now_s - self._began_s
        size = os.fstat(self._fd).st_size
        if size != self._seen:
            self._seen, self._grew_s = size, now_s
        whole = now_s - self._grew_s > _QUIET_S or since_s > _ALL_S
        if size > self._from and whole:
            data = os.pread(self._fd, size - self._from, self._from)
            return self._found("faulthandler", data)
        if since_s > _SIGNAL_S and size == self._from and not self._spied:
            self._spied, self._spy = True, _spy(self._pid)
        if (spy := self._spy) is not None and spy.poll() is not None:
            self._spy = None
            data, _ = spy.communicate()
            if spy.returncode == 0:
                return self._found("py-spy", data)
        return self._found("none", b"") if since_s > _ALL_S else None

    def _found(self, how: str, data: bytes) -> Stacks:
        self.close()
        blocks = _main_first(data.decode(errors="replace"))
        at = next((frame for line in blocks[:1] for frame in _frames(line)), "")
        text = "\n\n".join(blocks)[:MAX_TEXT]
        return Stacks(how=how, at=at, text=text, kernel=self._kernel)

    def close(self) -> None:
        """End a py-spy process that was started."""
        spy, self._spy = self._spy, None
        if spy is not None:
            if spy.poll() is None:
                spy.kill()
            spy.communicate()


def _spy(pid: int) -> subprocess.Popen[bytes] | None:
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return None
    try:
        return subprocess.Popen(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


def _main_first(text: str) -> list[str]:
    """Return one block per thread, the main thread's first: the oldest, which is listed last."""
    blocks = [block for block in text.strip().split("\n\n") if block]
    named = [block for block in blocks if '"MainThread"' in block]
    main = (named or blocks)[-1:]
    return main + [block for block in blocks if block not in main]


def _frames(block: str) -> list[str]:
    """Return the lines of a block that name a frame, innermost first."""
    return [line.strip() for line in block.splitlines()[1:] if line.strip()]


def stand_of(text: str) -> str:
    """Return the call of the user's code that the main thread is in, as ``dist.barrier at x.py:3``.

    ``text`` is as in `Stacks`; the result is empty if no frame is the user's.
    """
    name = ""
    for frame in _frames(text.partition("\n\n")[0]):
        if (found := _FRAME.fullmatch(frame)) is None:
            continue
        file, line, function = found.groups()
        if not _is_librarys(file):
            return f"{name or function} at {Path(file).name}:{line}"
        if function == "_finish" and file.endswith("loop/run.py"):
            return "the end of the function"
        name = _public_name(file, function) or name
    return ""


def _is_librarys(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or "/site-packages/" in file


def _public_name(file: str, function: str) -> str:
    """Return how users call a function of torch.distributed or of a run; '' for all others."""
    if _FULLY_SHARD in file:
        return SHARDED_MODULE
    if function.startswith("_") or function in _WRAPPERS:
        return ""
    if file.endswith("holdfast/elastic/loop/run.py"):
        return f"run.{function}"
    if file.endswith(_COLLECTIVES):
        return f"dist.{function}"
    if file.endswith(_SHARDED):
        return f"DTensor.{function}"
    return ""


def kernel_state(pid: int) -> str:
    """Return a process's state letter and its wait channel in the kernel, empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("0 \n")
    except OSError:
        return ""
    letter = stat.rpartition(")")[2].split()[0]
    return f"{letter} {waits}".strip()
