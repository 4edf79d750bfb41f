"""An uncaught Holdfast error ends a script with one line; the user's hook is restored."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest

from holdfast.ckpt.errors import FencedError, InternalError, NotFoundError
from holdfast.elastic.errors import ConfigError, Stopped
from holdfast.elastic.loop.uncaught.printing import show_plainly


class Hook:
    """A hook of the user's, which remembers what came to it."""

    def __init__(self) -> None:
        self.seen: list[BaseException] = []

    def __call__(self, kind: Any, error: BaseException, trace: Any) -> None:
        self.seen.append(error)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    found = Hook()
    monkeypatch.setattr(sys, "excepthook", found)
    return found


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, None)


def test_only_the_error_that_was_raised_is_printed_plainly(
    hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    error, other, users = ConfigError("seed=-1"), ConfigError("another"), ValueError("theirs")
    show_plainly(error, printed=False)
    for each in (error, other, users):
        uncaught(each)
    assert capsys.readouterr().err == "holdfast: seed=-1\n"
    assert hook.seen == [other, users]


def test_what_the_launcher_prints_is_not_printed_twice(
    hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ConfigError("seed=-1")
    show_plainly(error, printed=True)
    uncaught(error)
    assert (capsys.readouterr().err, hook.seen) == ("", [])


def test_the_users_hook_is_back_once_the_error_is_caught_and_gone(hook: Hook) -> None:
    first, second = ConfigError("first"), ConfigError("second")
    show_plainly(first, printed=False)
    show_plainly(second, printed=False)
    del first
    gc.collect()
    assert sys.excepthook is not hook
    del second
    gc.collect()
    assert sys.excepthook is hook


def test_a_hook_that_was_set_meanwhile_stays(hook: Hook) -> None:
    error = ConfigError("seed=-1")
    show_plainly(error, printed=False)
    ours, theirs = sys.excepthook, Hook()
    sys.excepthook = theirs
    del error
    gc.collect()
    assert sys.excepthook is theirs
    users = ValueError("theirs")
    ours(ValueError, users, None)
    assert hook.seen == [users]


def test_errors_that_are_not_ours_or_of_a_fenced_snapshot_keep_their_traceback(hook: Hook) -> None:
    for error in (ValueError("theirs"), FencedError("late")):
        show_plainly(error, printed=False)
        assert sys.excepthook is hook


@pytest.mark.parametrize(
    ("error", "is_plain"),
    [
        (Stopped("the launcher of this process has ended"), True),
        (NotFoundError("step 3 is not there"), True),
        (InternalError("a signal that nothing took"), False),
        (ZeroDivisionError("a bug"), False),
    ],
)
def test_only_a_bug_ends_a_script_with_a_traceback(
    error: Exception,
    is_plain: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_plainly(error, printed=False)
    sys.excepthook(type(error), error, None)
    assert (capsys.readouterr().err == f"holdfast: {error}\n") is is_plain
