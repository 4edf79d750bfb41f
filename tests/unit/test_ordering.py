"""The order of test files: long ones first."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest
from ordering import FOLDERS, LONG, longest, rank
from tree import ROOT

TESTS = ROOT / "tests"


def test_the_files_named_as_long_exist() -> None:
    assert [name for name in LONG if not (TESTS / name).exists()] == []
    assert len(set(LONG)) == len(LONG)


def test_every_folder_with_tests_that_run_everywhere_has_its_place() -> None:
    found = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert found - {"gpu"} <= set(FOLDERS)


def test_long_files_come_first_and_unit_tests_last() -> None:
    files = [
        "tests/unit/test_a.py",
        "tests/process/test_a.py",
        "tests/process/test_second.py",
        "tests/property/test_a.py",
        "tests/process/test_first.py",
    ]
    long = ("process/test_first.py", "process/test_second.py")
    found = sorted(files, key=lambda file: rank(PurePath(file), long=long))
    assert found == [files[4], files[2], files[1], files[3], files[0]]


def test_what_was_collected_is_in_that_order(request: pytest.FixtureRequest) -> None:
    ranks = [rank(item.path) for item in request.session.items]
    assert ranks == sorted(ranks)
    assert not getattr(request.config.option, "loadscopereorder", False), "it stays so"


def test_the_long_files_are_found_in_a_result(tmp_path: Path) -> None:
    for name in ("unit/test_a.py", "test_b.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    result = tmp_path / "result.xml"
    result.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.unit.test_a" name="one" time="30"/>'
        '<testcase classname="tests.unit.test_a.TestOfAStore" name="two" time="30.5"/>'
        '<testcase classname="tests.test_b" name="three" time="61"/>'
        '<testcase classname="tests.gone" name="four" time="99"/>'
        "</testsuite></testsuites>"
    )
    assert longest(result, tests=tmp_path, at_least_s=60.0) == ["test_b.py", "unit/test_a.py"]
    assert longest(result, tests=tmp_path, at_least_s=61.0) == ["test_b.py"]
