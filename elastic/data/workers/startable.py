"""Check whether a worker process that is not forked from the rank can receive its work.

The work has to be pickled. Classes and functions that the script defines have to be imported from
it, which runs the script once more unless it is guarded by ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from holdfast.ckpt.errors import InternalError
from holdfast.elastic.data.workers.starter import MAX_FDS

MOST_BYTES = 64 << 20
"""Larger objects are not copied to every worker; forked workers share them with the rank."""

_MOST_TENSORS = MAX_FDS // 2
_SCRIPT = "__main__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Startable:
    """The result of the check: ``why`` not, or "", and whether the script must be imported."""

    why: str = ""
    imports_main: bool = False


class _TooMuchError(InternalError):
    pass


class _PickleMeter(pickle.Pickler):
    """Pickles without output: counts bytes and tensors, and detects objects of the script."""

    def __init__(self) -> None:
        super().__init__(self, protocol=pickle.HIGHEST_PROTOCOL)
        self.bytes = self.tensors = 0
        self.of_script = False

    def write(self, data: Any) -> int:
        """Count the bytes; the pickler uses this object as its file."""
        return self._count(memoryview(data).nbytes)

    def _count(self, size: int) -> int:
        self.bytes += size
        if self.bytes > MOST_BYTES:
            raise _TooMuchError(f"it has more than {MOST_BYTES >> 20} MiB, which are not copied")
        return size

    def reducer_override(self, value: Any) -> Any:
        """Skip tensors, which travel as shared memory."""
        if isinstance(value, torch.Tensor):
            self.tensors += 1
            self._count(value.nbytes)
            if self.tensors > _MOST_TENSORS:
                raise _TooMuchError(f"it has more than {_MOST_TENSORS} tensors")
            return int, ()
        if isinstance(value, type | FunctionType) and value.__module__ == _SCRIPT:
            self.of_script = True
        return NotImplemented


def startable(parts: Iterable[object]) -> Startable:
    """Check whether ``parts`` can be given to a process that is not forked from this one."""
    meter = _PickleMeter()
    try:
        meter.dump(tuple(parts))
    except _TooMuchError as error:
        return Startable(why=str(error))
    except Exception as error:  # noqa: BLE001 - whatever is raised, it cannot be pickled
        return Startable(why=f"it cannot be pickled ({type(error).__name__}: {error})")
    if meter.of_script and not is_guarded():
        return Startable(
            why="it is defined in the script, which could only be imported if what it runs stood "
            'below `if __name__ == "__main__":`'
        )
    return Startable(imports_main=meter.of_script)


def is_guarded() -> bool:
    """Return whether the script has a ``__main__`` guard, so that importing it does not run it."""
    path = getattr(sys.modules[_SCRIPT], "__file__", None)
    if path is None:
        return False
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(part, ast.If) and _is_guard(part.test) for part in tree.body)


def _is_guard(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare):
        return False
    sides = [test.left, *test.comparators]
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return names and any(isinstance(side, ast.Constant) and side.value == _SCRIPT for side in sides)
