"""A tracker is opened at its first step, gets only what it has not, and ends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.loop.trackers import OpenTracker


class Notes:
    """A tracker that has some steps already."""

    def __init__(self, last: int = -1, *, fails: bool = False) -> None:
        self.last, self.fails = last, fails
        self.calls: list[str] = []

    def begin(self) -> int:
        self.calls.append("begin")
        return self.last

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self.calls.append(f"{step}: {metrics['loss']:g}")

    def close(self) -> None:
        self.calls.append("close")
        if self.fails:
            raise OSError("the server is gone")


def test_it_is_begun_at_the_first_step_and_gets_the_steps_that_it_has_not() -> None:
    notes = Notes(last=2)
    opened = OpenTracker(notes, pause=nullcontext)
    assert notes.calls == []
    for step in (1, 2, 3, 3, 4):
        opened.write(step, {"loss": step / 2})
    opened.close()
    assert notes.calls == ["begin", "3: 1.5", "4: 2", "close"]


def test_all_that_it_does_is_announced_as_a_pause() -> None:
    notes = Notes()

    @contextmanager
    def pause() -> Iterator[None]:
        notes.calls.append("(")
        yield
        notes.calls.append(")")

    opened = OpenTracker(notes, pause=pause)
    opened.write(0, {"loss": 1.0})
    opened.close()
    assert notes.calls == ["(", "begin", "0: 1", ")", "(", "close", ")"]


def test_one_that_got_no_step_is_neither_begun_nor_closed() -> None:
    notes = Notes()
    OpenTracker(notes, pause=nullcontext).close()
    assert notes.calls == []


def test_a_failure_to_close_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    opened = OpenTracker(Notes(fails=True), pause=nullcontext)
    opened.write(0, {"loss": 1.0})
    opened.close()
    assert "could not be closed" in caplog.text and "the server is gone" in caplog.text


def test_what_is_no_tracker_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match=r"it has no begin\(\); give a tracker of"):
        OpenTracker("runs/tensorboard", pause=nullcontext)  # type: ignore[arg-type]
