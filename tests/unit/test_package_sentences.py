"""The folders as a map: every package has one sentence that describes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tree import ROOT

PACKAGES = sorted(
    path
    for top in ("ckpt", "elastic", "adapters", "tools")
    for path in (ROOT / top).rglob("__init__.py")
)


@pytest.mark.parametrize(
    "path", PACKAGES, ids=[p.parent.relative_to(ROOT).as_posix() for p in PACKAGES]
)
def test_a_package_says_what_it_is_in_one_sentence(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text()))
    assert said, "no docstring"
    first = said.partition("\n\n")[0]
    assert first.endswith(".")
    assert first.split()[0] not in {
        "What",
        "Who",
        "How",
        "Where",
        "When",
        "Which",
        "Whether",
        "Whom",
    }
