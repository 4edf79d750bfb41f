"""The guide to porting: its programs run, its recipes are parts of tested loops."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import catalogue
import library
import pytest
from document_blocks import blocks, run_script
from tree import ROOT

GUIDE = ROOT / "docs" / "how-to" / "port-your-loop.md"
PROGRAMS = 2
"""The first blocks are whole programs."""


def loops() -> list[list[str]]:
    folder = Path(library.__path__[0])
    return [path.read_text().splitlines() for path in sorted(folder.glob("*.py"))]


def dedented(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip()


@pytest.mark.parametrize("number", range(PROGRAMS), ids=["plain", "ported"])
def test_a_program_of_the_guide_trains(tmp_path: Path, number: int) -> None:
    said = run_script(tmp_path, blocks(GUIDE, "python")[number])
    assert re.fullmatch(r"loss [0-4]\.\d{3}\n", said)


RECIPES = blocks(GUIDE, "python")[PROGRAMS:]


@pytest.mark.parametrize("number", range(len(RECIPES)))
def test_a_recipe_is_part_of_a_loop_that_is_tested(number: int) -> None:
    lines = RECIPES[number].splitlines()
    wanted, count = dedented(lines), len(lines)
    assert any(
        dedented(found[at : at + count]) == wanted
        for found in loops()
        for at in range(len(found) - count + 1)
    ), f"in no module of tests/loops/library:\n{RECIPES[number]}"


def test_the_table_of_changed_lines_is_current() -> None:
    assert GUIDE.read_text().endswith(catalogue.table()), (
        "the table of the guide is old: python tests/loops/catalogue.py"
    )
