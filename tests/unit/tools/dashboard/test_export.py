"""A run as one file: hostile names stay text, and a long run needs no lane for each worker."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from large_run import BEGIN_S, training, write

from holdfast.elastic.events import Detected, Event, JobEnded
from holdfast.tools.dashboard import export
from holdfast.tools.dashboard.export import render
from holdfast.tools.dashboard.export import write as write_page
from holdfast.tools.live.follow import Follower

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'


def hostile(event: Event) -> Event:
    names = {"seat": f"{event.seat}{HOSTILE}"} if event.seat else {}
    if isinstance(event, Detected):
        names |= {"victim": event.victim + HOSTILE, "why": HOSTILE}
    return msgspec.structs.replace(event, **names)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    write(tmp_path, map(hostile, training(2, steps=20, lose_every=5)))
    follower = Follower(tmp_path)
    follower.read()
    page = render(follower.view(), [tmp_path])
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    assert "<img" not in page
    assert "49" not in page.partition("alert(2)")[2][:40]


def test_a_finished_run_is_written_whole(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ended = JobEnded(ok=True, message="all is done", node="launcher", time_s=BEGIN_S + 99)
    write(run_dir, iter([*training(2, steps=20), ended]))
    page = tmp_path / "out" / "page.html"
    write_page(page, Follower(run_dir))
    assert "all is done" in page.read_text()
    assert "timeline of the job" in page.read_text()


def test_a_long_run_has_a_curve_in_place_of_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_DETAILED_EVENTS", 10)
    write(tmp_path, training(2, steps=20))
    follower = Follower(tmp_path)
    follower.read()
    assert "too long for a lane per worker" in render(follower.view(), [tmp_path])
