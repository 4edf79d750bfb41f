"""Restores from a store, where memory has nothing or fell behind, and stores that refuse."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from restoring_ranks import (
    RANK_NODES,
    Ranks,
    build,
    damage,
    restore,
    save,
    steps_held,
    value,
    without_memory,
)
from sidecar_group import SidecarGroup

from holdfast import ckpt
from holdfast.ckpt.checkpoints import source
from holdfast.ckpt.errors import CorruptError, StoreError
from holdfast.ckpt.store.local import LocalStore
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import RestoreProgressed
from holdfast.elastic.membership.records import Origin
from holdfast.elastic.tracked.sources import stored
from holdfast.elastic.tracked.sources.pacing import Pacing

pytestmark = pytest.mark.usefixtures("opened_ahead")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE_S", "_NEWER_LIMIT_S"):
        monkeypatch.setattr(stored, name, 1.0)
    monkeypatch.setattr(stored, "_PAUSE_S", 0.1)


def refuse(
    monkeypatch: pytest.MonkeyPatch, *methods: str, error: Exception, times: int = 10**9
) -> None:
    """Have a store refuse the first ``times`` calls of its methods."""
    left = {"calls": times}
    for method in methods:
        real = getattr(LocalStore, method)

        def call(*args: Any, _real: Any = real, **named: Any) -> Any:
            left["calls"] -= 1
            if left["calls"] >= 0:
                raise error
            return _real(*args, **named)

        monkeypatch.setattr(LocalStore, method, call)


FULL = StoreError("/store: cannot write in it: No space left on device; make room there")


def test_a_store_that_cannot_be_written_for_a_while_ends_no_job_that_has_trained(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "write", error=FULL)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "checkpoints fail for now: " in caplog.text and "No space left" in caplog.text


def test_a_store_that_cannot_be_written_is_refused_as_a_job_starts(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    ranks.ahead = False  # there is nothing to open
    points = save(group, ranks)
    refuse(monkeypatch, "write", error=FULL)
    results, _ = restore(group, ranks, *points, root=tmp_path / "saved", number=1)
    assert [(type(each), str(each)) for each in results] == [(StoreError, str(FULL))] * 2


def test_the_progress_of_a_long_read_is_told(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_CALL_BYTES", 1)
    monkeypatch.setattr(stored, "Pacing", partial(Pacing, every_s=0.0))
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    _, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    told = [event for event in ranks.events if isinstance(event, RestoreProgressed)]
    assert {(event.rank, event.step) for event in told} == {(0, 7), (1, 7)}
    assert all(0 < event.bytes < event.total_bytes and event.left_s > 0 for event in told)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("methods", [("names",), ("size",), ("open",), ("names", "open", "read")])
def test_a_store_that_cannot_be_read_for_a_while_is_waited_for(
    group: SidecarGroup,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    methods: tuple[str, ...],
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    broken = OSError(5, "Input/output error")
    error = StoreError("/store: cannot read it: Input/output error")
    error.__cause__ = broken
    refuse(monkeypatch, *methods, error=error, times=3)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]
    assert {each.tier for each in results} == {"checkpoint"}


@pytest.mark.usefixtures("impatient")
def test_bytes_that_a_disk_does_not_return_for_a_while_are_waited_for(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    error = CorruptError("/store: the disk fails to read it")
    error.__cause__ = OSError(5, "Input/output error")
    refuse(monkeypatch, "read", "open", error=error, times=3)
    _, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [7, 7]


@pytest.mark.usefixtures("impatient")
def test_a_store_that_stays_away_ends_the_job_in_the_end(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = without_memory(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", error=StoreError("/store: gone"))
    results, _ = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [type(each) for each in results] == [JobFailedError, JobFailedError]
    assert "memory has nothing to restore, and the store refuses since 1 s: /store: gone" in str(
        results[0]
    )


BEFORE = (Origin(generation=1, step=9),)
"""A timeline in which generation 1 went on from step 9 of generation 0, which `ckpt.save` names."""


def test_a_checkpoint_comes_first_if_memory_fell_behind_it(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for step in (1, 6, 7):
        ckpt.save(tmp_path / "saved", build(step), step=step)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [7, 7]
    assert {(each.tier, each.step) for each in results} == {("checkpoint", 7)}
    assert "newer than step 2 of generation 1 in memory" in results[0].how
    assert steps_held(group) == set(), "no later generation goes back to what memory had"


@pytest.mark.parametrize(
    "kept", ["older", "as memory has it", "of an abandoned future", "damaged", "of another run"]
)
def test_memory_comes_first_if_no_newer_checkpoint_is_good(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    step = {"older": 1, "as memory has it": 2, "of an abandoned future": 10}.get(kept, 7)
    ckpt.save(tmp_path / "saved", build(step), step=step)
    if kept == "damaged":
        for pack in (tmp_path / "saved").rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
    if kept == "of another run":
        real = stored.newer_steps
        monkeypatch.setattr(
            stored, "newer_steps", lambda root, **named: real(root, **{**named, "run": "other"})
        )
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"peer"}
    assert steps_held(group) == {1, 2}


def test_a_store_is_not_asked_if_memory_did_not_fall_behind(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", "read", "open", error=AssertionError("the store was asked"))
    _, states = restore(group, ranks, *points, root=tmp_path / "saved")
    assert [value(state) for state in states] == [2, 2]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_training_goes_on_from_memory_if_the_store_does_not_answer_in_time(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, how: str
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    over = threading.Event()
    if how == "refuses":
        refuse(monkeypatch, "names", error=StoreError("/store: gone"))
    else:
        monkeypatch.setattr(LocalStore, "names", lambda *_: over.wait(60) and [])
    _, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    over.set()
    assert [value(state) for state in states] == [2, 2]
    assert "going on from step 2, though checkpoints may be newer: " in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_store_that_refuses_for_a_moment_still_comes_first(
    group: SidecarGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    ckpt.save(tmp_path / "saved", build(7), step=7)
    refuse(monkeypatch, "names", "open", error=StoreError("/store: gone"), times=3)
    _, states = restore(group, ranks, *points, root=tmp_path / "saved", before=BEFORE)
    assert [value(state) for state in states] == [7, 7]


def test_a_checkpoint_comes_before_an_older_step_if_the_newest_is_damaged(
    group: SidecarGroup, tmp_path: Path
) -> None:
    ranks = Ranks()
    points = save(group, ranks)
    for rank in range(len(RANK_NODES)):
        damage(group, points[0], rank=rank)
    ckpt.save(tmp_path / "saved", build(2), step=2)
    timeline = (Origin(generation=2, step=2),)
    results, states = restore(group, ranks, *points, root=tmp_path / "saved", timeline=timeline)
    assert [value(state) for state in states] == [2, 2]
    assert {each.tier for each in results} == {"checkpoint"}
    assert "newer than step 1 of generation 1 in memory" in results[0].how
