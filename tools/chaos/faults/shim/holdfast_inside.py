"""The agent in a struck process: it reads orders from a FIFO. It uses only the standard library.

`sitecustomize` beside it loads it before the program, which needs no change. The agent never
imports torch. If the program imports it, the agent registers a hook before every optimizer's step,
which costs one look at an empty dict. The FIFO is ``PID.fifo`` in the folder that `ORDERS` names;
an order is one line of JSON.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import math
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ORDERS: Final = "HOLDFAST_CHAOS_ORDERS"
TRAINS: Final = ".trains"
"""Suffix of the file that marks a process with optimizers."""

_OPTIMIZERS: Final = "torch.optim.optimizer"
_LINE_BYTES: Final = 4096
_FOREVER_S: Final = 1e9
_BALLOON_STEP_BYTES: Final = 16 << 20
_LEFT_BYTES: Final = 512 << 20
"""Memory of the machine that a balloon always leaves free."""

_fifos: list[int] = []
_ends: dict[int, threading.Event] = {}
_slow_s: dict[int, float] = {}
_corrupt: dict[int, tuple[int, float]] = {}

Order = dict[str, Any]


def start() -> None:
    """Read orders from now on, if the environment names the folder; also in forked children."""
    folder = os.environ.get(ORDERS)
    if not folder:
        return
    path = Path(folder, f"{os.getpid()}.fifo")
    try:
        path.unlink(missing_ok=True)  # left by a process that had the same id
        os.mkfifo(path, 0o600)
        fifo = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # the run's folder is gone: no orders will come
    _fifos.append(fifo)
    threading.Thread(target=_listen, args=(fifo,), name="holdfast-chaos", daemon=True).start()
    if not any(isinstance(finder, _ImportHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHook())
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    while _fifos:
        os.close(_fifos.pop())  # else the parent's FIFO would seem to have a reader after its death
    start()
    if _OPTIMIZERS in sys.modules:
        _mark()


def _listen(fifo: int) -> None:
    waiting = b""
    while True:
        waiting += os.read(fifo, _LINE_BYTES)
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            order = json.loads(line)
            _WAYS[order["do"]](order)


def _end(order: Order) -> None:
    if end := _ends.pop(order["number"], None):
        end.set()
    _slow_s.pop(order["number"], None)


def _ending(order: Order) -> threading.Event:
    return _ends.setdefault(order["number"], threading.Event())


def _exit(order: Order) -> None:
    os._exit(int(order["amount"]))


def _segfault(order: Order) -> None:
    import ctypes
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    ctypes.memset(0, 0, 1)


def _lock_up(order: Order) -> None:
    """Sleep in C while holding the interpreter's lock, as a hanging extension does."""
    import ctypes

    seconds, whole = math.modf(order["lasts_s"] or _FOREVER_S)
    left = (ctypes.c_long * 2)(int(whole), int(seconds * 1e9))
    sleep = ctypes.PyDLL(None).nanosleep  # PyDLL keeps the interpreter's lock
    while sleep(left, left):  # a signal woke it; the remaining time is in ``left``
        pass


def _balloon(order: Order) -> None:
    """Allocate memory up to the limit, and hold it until the end."""
    most_bytes, end = int(order["amount"] * (1 << 20)), _ending(order)
    threading.Thread(target=_hold, args=(most_bytes, end), daemon=True).start()


def _hold(most_bytes: int, end: threading.Event) -> None:
    room = []
    for _ in range(0, most_bytes, _BALLOON_STEP_BYTES):
        if end.is_set() or _available_bytes() < _LEFT_BYTES + _BALLOON_STEP_BYTES:
            break
        piece = mmap.mmap(-1, _BALLOON_STEP_BYTES)
        for page in range(0, _BALLOON_STEP_BYTES, mmap.PAGESIZE):
            piece[page] = 1
        room.append(piece)
    end.wait()
    for piece in room:
        piece.close()


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return sys.maxsize


def _burn(order: Order) -> None:
    """Keep processors busy without the interpreter's lock, so that other threads keep running."""
    import hashlib

    end = _ending(order)

    def burn() -> None:
        while not end.is_set():
            hashlib.pbkdf2_hmac("sha256", b"holdfast", b"chaos", 50_000)

    for _ in range(int(order["amount"]) or os.cpu_count() or 1):
        threading.Thread(target=burn, daemon=True).start()


def _slow(order: Order) -> None:
    _slow_s[order["number"]] = order["amount"]


def _poison(order: Order) -> None:
    """Replace the next loss by NaN or infinity, for its backward pass and for the loop."""
    import torch.autograd

    value, real = float(order["value"]), torch.autograd.backward

    def poisoned(tensors: Any, grad_tensors: Any = None, *args: Any, **words: Any) -> None:
        torch.autograd.backward = real
        losses = list(tensors) if isinstance(tensors, Sequence) else [tensors]
        for loss in losses:
            loss.data.fill_(value)
        real(losses, [torch.full_like(loss, value) for loss in losses], *args, **words)

    torch.autograd.backward = poisoned


def _flip_gradient(order: Order) -> None:
    _corrupt[order["number"]] = int(order["amount"]), order["pick"]


def _before_step(optimizer: Any, args: Any, words: Any) -> None:
    """Apply the pending orders before each optimizer's step."""
    if _slow_s:
        time.sleep(sum(_slow_s.values()))
    while _corrupt:
        with contextlib.suppress(KeyError):
            bits, pick = _corrupt.pop(next(iter(_corrupt)))
            _corrupt_gradients(optimizer, bits, random.Random(pick))


def _corrupt_gradients(optimizer: Any, bits: int, source: random.Random) -> None:
    """Flip ``bits`` bits, each in a random element of a random parameter's gradient."""
    import torch

    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    # of a DTensor, this rank's part
    found = [each.to_local() if hasattr(each, "to_local") else each for each in gradients]
    found = [gradient for gradient in found if gradient.numel()]
    sizes = [gradient.numel() for gradient in found]
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for gradient in source.choices(found, sizes, k=bits) if found else ():
        width = gradient.element_size() * 8
        bit = 1 << source.randrange(width)
        at = tuple(source.randrange(size) for size in gradient.shape)
        element = gradient.detach()[at].reshape(1).cpu().view(integers[width // 8])
        flipped = element ^ (bit if bit < 1 << width - 1 else bit - (1 << width))
        gradient.detach()[at] = flipped.view(gradient.dtype)[0].to(gradient.device)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Installs the optimizer hook when torch.optim is imported; finds no module itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _OPTIMIZERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                module.register_optimizer_step_pre_hook(_before_step)
                _mark()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _mark() -> None:
    with contextlib.suppress(OSError):
        Path(os.environ[ORDERS], f"{os.getpid()}{TRAINS}").touch()


_WAYS: Final[dict[str, Callable[[Order], None]]] = {
    "end": _end,
    "exit": _exit,
    "segfault": _segfault,
    "gil-lockup": _lock_up,
    "memory-balloon": _balloon,
    "cpu-burn": _burn,
    "slow-rank": _slow,
    "nan-loss": _poison,
    "inf-loss": _poison,
    "corrupt-gradient": _flip_gradient,
}
