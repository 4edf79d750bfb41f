"""Faults of the user's code that every further try would meet again.

A connection, a device or a full disk may be better at the next try. A wrong name, type, shape or
value is not, if all ranks meet it at the same line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.loop.user_code import is_users

_LASTING: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
_OF_DEVICES: Final = re.compile(r"CUDA|NCCL|cuDNN|cuBLAS|out of memory|allocate", re.IGNORECASE)
_COLLECTIVES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
)


def lasting_fault(error: BaseException) -> str:
    """Return the kind and line of an error of the user's code, as ``KeyError at train.py:41``.

    The result is empty if the error may be gone at the next try: if it, or one that led to it, is
    of the operating system, of a device, of a collective or of Holdfast, or is of no known kind.
    """
    if not all(_lasts(each) for each in _led_to(error)):
        return ""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.endswith(_COLLECTIVES):
            return ""
        if is_users(file):
            place = f"{Path(file).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {place}" if place else ""


def _led_to(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _lasts(error: BaseException) -> bool:
    if isinstance(error, HoldfastError | OSError):
        return False
    if isinstance(error, _LASTING):
        return True
    return type(error) is RuntimeError and not _OF_DEVICES.search(str(error))
