"""Objects that a spawned process can receive, and the reasons for refusals."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from loader_worlds import Numbers, as_list

from holdfast.elastic.data.workers.startable import MOST_BYTES, is_guarded, startable


class Holding:
    """Something that holds something."""

    def __init__(self, what: Any) -> None:
        self.what = what


def test_what_is_imported_can_be_given_without_the_script() -> None:
    found = startable((Numbers(3), as_list, None, torch.ones(3), np.zeros(3)))
    assert (found.why, found.imports_main) == ("", False)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda: 3, "cannot be pickled"),
        (threading.Lock(), "cannot be pickled"),
        (np.zeros(MOST_BYTES // 8 + 1), "more than 64 MiB"),
        (torch.zeros(MOST_BYTES // 4 + 1), "more than 64 MiB"),
        ([torch.zeros(1) for _ in range(200)], "more than 100 tensors"),
    ],
)
def test_what_cannot_be_given_is_told_with_the_reason(what: Any, why: str) -> None:
    assert why in startable((Holding(what),)).why


def test_looking_moves_no_tensor_into_shared_memory() -> None:
    tensor = torch.ones(3)
    startable((tensor,))
    assert not tensor.is_shared()


GUARDED = "if __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        (GUARDED, True),
        ("x = 1\n" + GUARDED, True),
        ("if '__main__' == __name__:\n    main()\n", True),
        ("main()\n", False),
        ("def f():\n    if __name__ == '__main__':\n        pass\nf()\n", False),
        ("if x == '__main__':\n    main()\n", False),
        ("not python\n", False),
    ],
)
def test_a_script_with_a_guard_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, guarded: bool
) -> None:
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text(source)

    class Own:
        pass

    Own.__module__, Own.__qualname__ = "__main__", "Own"
    script.Own = Own  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", script)
    assert is_guarded() is guarded
    found = startable((Own(),))
    assert found.imports_main is guarded
    assert bool(found.why) is not guarded


def test_what_was_typed_in_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert not is_guarded()
