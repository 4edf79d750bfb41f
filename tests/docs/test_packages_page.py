"""The page of other packages names tests that exist, and the versions that these run with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from environments import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "packages.md"

PACKAGES = (
    *("boto3", "obstore", "transformers", "trl", "peft", "torchdata", "torchtitan", "accelerate"),
    *("lightning", "ray"),
)

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| [")
]


def pins() -> dict[str, set[str]]:
    """Return the versions of each package in the environments of the tests."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    found: dict[str, set[str]] = {}
    for line in (*pinned, *(r for e in ENVIRONMENTS.values() for r in e.requirements)):
        if match := re.fullmatch(r"([\w.-]+)==([\w.]+)", line):
            found.setdefault(match[1], set()).add(match[2])
    return found


@pytest.mark.parametrize("row", ROWS, ids=[re.sub(r"\(.*?\)", "", row[0], count=1) for row in ROWS])
def test_every_row_names_tests_that_exist_and_a_version_that_they_run_with(row: list[str]) -> None:
    package, version, works, _, tests = row
    assert works
    paths = re.findall(r"`(tests/[\w/.]+)`", tests)
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    (name,) = re.findall(r"^\[([\w-]+)\]\(", package)
    if known := pins().get(name):
        assert version in known


def test_the_page_has_a_row_for_every_extra_that_is_another_package_s() -> None:
    named = " ".join(row[0] for row in ROWS)
    for package in PACKAGES:
        assert f"[{package}]" in named
