"""Errors that every retry meets again are told from those that may be gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.uncaught.faults import lasting_fault

HERE = Path(__file__).name


def caught(code: str) -> Exception:
    try:
        exec(compile(code, __file__, "exec"), {"torch": torch, "nn": nn})
    except Exception as error:  # noqa: BLE001 - any is the subject
        return error
    raise AssertionError(code)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("{}['vocab']", "KeyError"),
        ("nn.Linear(4, 4)(torch.zeros(2, 5))", "RuntimeError"),
        ("unknown", "NameError"),
        ("raise NotImplementedError", "NotImplementedError"),
    ],
)
def test_a_fault_of_the_script_lasts_and_has_the_users_line(code: str, kind: str) -> None:
    assert lasting_fault(caught(f"\n\n{code}")) == f"{kind} at {HERE}:3"


@pytest.mark.parametrize(
    "code",
    [
        "raise ConnectionError('refused')",
        "open('/nowhere/at/all')",
        "raise RuntimeError('CUDA error: device-side assert')",
        "raise torch.OutOfMemoryError('x')",
        "raise MemoryError",
        "try:\n raise TimeoutError\nexcept OSError as e:\n raise ValueError('no data') from e",
        "import torch.distributed as d\nd.get_rank()",
    ],
)
def test_what_may_be_gone_at_the_next_try_does_not(code: str) -> None:
    assert lasting_fault(caught(code)) == ""


def test_an_error_of_ours_or_without_a_line_does_not() -> None:
    assert lasting_fault(ConfigError("seed=-1")) == ""
    assert lasting_fault(ValueError("made, not raised")) == ""
