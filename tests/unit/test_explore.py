"""The exploration of property tests: each failure is kept with the command that repeats it."""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path

import explore
import pytest
from exploring import examples
from hypothesis import settings

_CONFTEST = """
from hypothesis import settings
settings.register_profile("explore", max_examples=200)
"""
_FAILS = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_no_number_is_large(n):
    assert n < 100

def test_without_examples():
    raise SystemExit("is not selected")
"""


def test_more_examples_are_drawn_where_the_profile_asks_for_more() -> None:
    assert examples(30) == 30 * settings.default.max_examples // 100
    assert settings.get_profile("explore").max_examples >= 1000


def test_each_round_has_every_file_with_a_new_seed() -> None:
    found = list(islice(explore.tries(["a", "b", "c"], random.Random(1)), 6))
    assert {each.path for each in found[:3]} == {each.path for each in found[3:]} == {*"abc"}
    assert len({each.seed for each in found}) == 6


def test_a_failure_is_kept_with_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explore, "ROOT", tmp_path)
    monkeypatch.setattr(explore, "KEPT", tmp_path / ".explore")
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "test_numbers.py").write_text(_FAILS)
    (tmp_path / "test_plain.py").write_text("")
    assert explore.files(["."]) == ["test_numbers.py"]
    one = explore.Try(path="test_numbers.py", seed=7)
    assert explore.attempt(one, deadline_s=time.monotonic() + 600) is False
    kept = (tmp_path / ".explore/test_numbers-7.txt").read_text()
    assert "--hypothesis-seed=7" in capfd.readouterr().out
    assert kept.startswith(one.command)
    assert "n=100" in kept
    assert "is not selected" not in kept
    assert explore.attempt(one, deadline_s=0.0) is None
