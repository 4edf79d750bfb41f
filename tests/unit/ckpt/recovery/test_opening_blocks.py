"""A source in a ``with`` block opens its blocks while its reader does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.slots import FakeSidecar

from holdfast.ckpt.errors import PeerError
from holdfast.ckpt.state.saved import read_tensors

_PATIENCE_S = 30.0


@pytest.fixture
def sidecar(tmp_path: Path) -> FakeSidecar:
    sidecar = FakeSidecar(directory=tmp_path)
    with closing(sidecar.snapshotter()) as snapshotter:
        snapshotter.snapshot({"a": torch.ones(8)}, 1)
        snapshotter.fence()
    return sidecar


def on_opening(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have the sidecar ``act`` whenever a block is opened."""
    answer = FakeSidecar.open_block

    def open_block(*given: Any, **named: Any) -> Any:
        act()
        return answer(*given, **named)

    monkeypatch.setattr(FakeSidecar, "open_block", open_block)


def test_blocks_are_opened_once_and_before_they_are_wanted(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Semaphore(0)
    on_opening(monkeypatch, opened.release)
    with sidecar.source(1) as source:
        assert opened.acquire(timeout=_PATIENCE_S)
        assert read_tensors(source, ["a"])["a"].tolist() == [1] * 8
    assert not opened.acquire(blocking=False)


def test_a_fault_of_the_opening_is_raised_and_recorded_where_blocks_are_wanted(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise PeerError("gone")

    on_opening(monkeypatch, fail)
    with sidecar.source(1) as source:
        with pytest.raises(PeerError, match="gone"):
            source.indexes()
        assert len(source.faults) == 1


def test_a_source_that_is_not_read_reports_no_fault(
    sidecar: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    on_opening(monkeypatch, lambda: waits.wait(_PATIENCE_S) and None)
    with sidecar.source(1) as source:
        pass
    waits.set()
    assert source.faults == []
