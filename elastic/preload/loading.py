"""The imports of a fork server, each checked for what a forked process would lack.

A fork copies only the calling thread, no child process, and no state of a CUDA driver.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from holdfast.elastic.errors import ConfigError

_ASK_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
_DEVICES: Final = ("cuda", "xpu")
_POISONED: Final = 3
_OF_TRAINERS: Final = ("holdfast.elastic.loop.run", "holdfast.elastic.loop.generations")


class UnfitModuleError(ConfigError):
    """Workers cannot be forked after the import of ``module``, for ``reason``."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module} {reason}")
        self.module, self.reason = module, reason


def load(modules: Sequence[str], begins: Callable[[str], None]) -> None:
    """Import ``modules``; call ``begins`` before each. Raises `UnfitModuleError`.

    If torch is among what they import, import Holdfast's loop too, which every trainer needs, and
    what torch imports for the first optimizer.

    Existing objects are then frozen: a collection in a worker would write to the pages of all of
    them, and so copy these.
    """
    with _devices_asked_without_driver(), _no_collection():
        for name in modules:
            begins(name)
            _load(name)
        if "torch" in sys.modules:
            for name in _OF_TRAINERS:
                begins(name)
                _load(name)
            sys.modules[_OF_TRAINERS[-1]].import_all()
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage: imports make little, and a search for it takes a tenth of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _load(name: str) -> None:
    before, children = _threads(), _children()
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        message = f"cannot be imported ({type(error).__name__}: {error})"
        raise UnfitModuleError(name, message) from error
    if reason := _device_in_use():
        raise UnfitModuleError(name, reason)
    probe = _probe()  # before it forks, OpenBLAS ends its threads: they start when next needed
    if probe:
        raise UnfitModuleError(name, "asks the CUDA driver for devices, which a fork cannot use")
    if len(_threads() - before) > 0:
        raise UnfitModuleError(name, f"starts threads ({_names()}), which a fork does not copy")
    if _children() - children:
        raise UnfitModuleError(name, "starts a process, which forked workers would share")


@contextlib.contextmanager
def _devices_asked_without_driver() -> Iterator[None]:
    """Make ``torch.cuda.is_available()`` ask NVML, which does not initialise CUDA."""
    if _ASK_NVML in os.environ:
        yield
        return
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        del os.environ[_ASK_NVML]


def _device_in_use() -> str:
    for kind in _DEVICES:
        device: Any = getattr(sys.modules.get("torch"), kind, None)
        if device is not None and device.is_initialized():
            return f"initialises {kind.upper()}, which a fork cannot use"
    return ""


def _probe() -> bool:
    """Return whether a forked process could not use a device."""
    pid = os.fork()
    if not pid:
        os._exit(_POISONED if _is_poisoned() else 0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == _POISONED


def _is_poisoned() -> bool:
    devices: list[Any] = [getattr(sys.modules.get("torch"), kind, None) for kind in _DEVICES]
    return any(bool(getattr(each, "_is_in_bad_fork", bool)()) for each in devices)


def _threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def _children() -> set[str]:
    found: set[str] = set()
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a kernel without these files
            found.update((path / "children").read_text().split())
    return found


def _names() -> str:
    """Return the names of the threads that Python knows, else say that it knows none."""
    names = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    return ", ".join(names) or "none of them Python's"
