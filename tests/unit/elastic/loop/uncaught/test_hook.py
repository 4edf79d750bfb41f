"""Of the workers that meet one error, one prints its traceback; the user's hook is left alone."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.elastic.channel.base import WORKER_ENV, WorkerConfig
from holdfast.elastic.loop.uncaught.hook import claimed_before, watch_worker
from holdfast.elastic.membership import messages


def raised(message: str, *, line: int) -> Exception:
    """Return an error that came from one of two lines."""
    try:
        if line == 1:
            raise KeyError(message)
        raise KeyError(message)
    except KeyError as error:
        return error


def test_one_process_shows_the_errors_of_a_kind_at_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "tracebacks"
    first, same, other = raised("a", line=1), raised("b", line=1), raised("a", line=2)
    assert [claimed_before(error, folder) for error in (first, same, other)] == [False, True, False]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_each_shows_its_own_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert not claimed_before(raised("a", line=1), folder)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, int]]:
    """Give the agent's end of a channel, and the descriptor of the worker's."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs.fileno()


def as_worker(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, agent: int, channel: int = -1
) -> None:
    """Make this process look as one that the process ``agent`` started."""
    more: dict[str, Any] = {"run": "r", "node": "n", "seat": "trainer/0", "attempt": 1}
    config = WorkerConfig(
        **more,
        channel_fd=channel,
        page_fd=-1,
        incarnation="i",
        sidecar="",
        key_file="",
        traceback_claims=str(folder),
        agent=agent,
    )
    monkeypatch.setenv(WORKER_ENV, msgspec.json.encode(config).decode())
    watch_worker()


def test_a_worker_reports_the_error_and_prints_it_if_it_is_the_first(
    agent: tuple[socket.socket, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end, channel = agent
    as_worker(monkeypatch, tmp_path / "tracebacks", agent=os.getppid(), channel=channel)
    error = raised("vocab", line=1)
    for _ in range(2):
        sys.excepthook(KeyError, error, error.__traceback__)
    assert capsys.readouterr().err.count("KeyError: 'vocab'") == 1
    said = messages.from_worker.decode(end.recv(10_000).splitlines()[0])
    assert isinstance(said, messages.Fail)
    assert said.message == "KeyError: 'vocab'"
    assert said.fault.startswith("KeyError at test_hook.py:")


def test_a_child_of_a_worker_reports_nothing_and_prints(
    agent: tuple[socket.socket, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    end, channel = agent
    as_worker(monkeypatch, tmp_path, agent=1, channel=channel)
    error = raised("vocab", line=1)
    for _ in range(2):
        sys.excepthook(KeyError, error, error.__traceback__)
    assert capsys.readouterr().err.count("KeyError: 'vocab'") == 2
    with pytest.raises(BlockingIOError):
        end.recv(1)


def test_neither_another_process_nor_a_hook_of_the_users_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv(WORKER_ENV, raising=False)
    watch_worker()
    assert sys.excepthook is sys.__excepthook__

    def theirs(*_: object) -> None: ...

    monkeypatch.setattr(sys, "excepthook", theirs)
    as_worker(monkeypatch, tmp_path, agent=os.getppid())
    assert sys.excepthook is theirs
