"""Only tested torch versions are used; packaging, tests and document agree on them."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from tree import ROOT

from holdfast import ckpt
from holdfast.ckpt import torch_versions
from holdfast.ckpt.torch_versions import ALLOW_ENV, TESTED, objection, requirement

MINORS = [f"{major}.{minor}" for major, minor in TESTED]


@pytest.mark.parametrize("found", ["2.13.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0.post1"])
def test_a_tested_version_is_used_without_a_word(found: str) -> None:
    assert objection(found, {}) == ""


@pytest.mark.parametrize("found", ["2.12.1", "2.16.0", "3.13.0", "2.15.0a0+git", "2.14.0.dev1", ""])
def test_another_is_refused_with_the_range_and_the_ways_on(found: str) -> None:
    reason = objection(found, {})
    assert f"torch {found} was never tested" in reason
    assert requirement() in reason and f"{ALLOW_ENV}=1" in reason
    assert objection(found, {ALLOW_ENV: "0"}) == reason


def test_one_that_is_allowed_expressly_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=torch_versions.__name__):
        for _ in range(3):
            assert objection("2.98.0", {ALLOW_ENV: "1"}) == ""
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch 2.98.0 was never tested" in caplog.text


def test_nothing_is_saved_or_loaded_with_a_version_that_was_never_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"x": torch.ones(2)}
    ckpt.save(tmp_path, state, step=1)
    monkeypatch.setattr(torch, "__version__", "2.97.0")
    with pytest.raises(ckpt.VersionError, match=r"2\.97\.0 was never tested"):
        ckpt.save(tmp_path, state, step=2)
    with pytest.raises(ckpt.VersionError, match=r"2\.97\.0 was never tested"):
        ckpt.load(tmp_path, state)
    monkeypatch.setenv(ALLOW_ENV, "1")
    ckpt.save(tmp_path, state, step=2)
    assert ckpt.load(tmp_path, state).step == 2


def test_the_package_allows_what_was_tested_and_no_more() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement() in project["dependencies"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert project["requires-python"] == f">={pythons[0]},<3.{int(pythons[-1][2:]) + 1}"
    assert [version.rpartition(".")[0] for version in matrix.TORCHES] == MINORS
    document = (ROOT / "docs" / "reference" / "versions.md").read_text()
    rows = set(re.findall(r"^\| (3\.\d+) \| (\d+\.\d+)\.\d+ \|", document, re.MULTILINE))
    assert {python for python, _ in rows} == set(pythons)
    assert {minor for _, minor in rows} == set(MINORS)


def test_the_seams_that_the_matrix_runs_are_there() -> None:
    assert [path for path in matrix.SEAMS if not (ROOT / path).exists()] == []


def test_the_unit_tests_of_every_package_that_uses_torchs_private_names_are_seams() -> None:
    """A package's own folder counts, or that of its parent."""
    users = {
        path.relative_to(ROOT).parent
        for package in ("ckpt", "elastic", "adapters")
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"^\s*from holdfast\.ckpt(\.torch_private)? import .*", path.read_text(), re.M)
        and "torch_private" in path.read_text()
        and path.parent != ROOT / "ckpt"
    }
    assert len(users) > 8
    tests = {
        Path("tests/unit") / user.relative_to("adapters" if "adapters" in user.parts else ".")
        for user in users
    }
    seams = {Path(seam) for seam in matrix.SEAMS}
    assert [test for test in sorted(tests) if not {test, *test.parents} & seams] == []


def test_the_table_of_the_matrix_has_what_pytest_said() -> None:
    text = "FAILED tests/a.py::test_x[1] - it\n== 1 failed, 12 passed, 3 skipped in 61.50s =="
    outcome = matrix.outcome_of(text, version="3.12", torch="2.14.1")
    assert (outcome.passed, outcome.skipped, outcome.seconds) == (12, 3, 62)
    assert outcome.failed == ("tests/a.py::test_x[1]",)
    assert "| 3.12 | 2.14.1 | 12 | `test_x[1]` | 3 |" in matrix.table(iter([outcome]))
    with pytest.raises(ValueError, match="ran no test"):
        matrix.outcome_of("ImportError", version="3.12", torch="2.14.1")
