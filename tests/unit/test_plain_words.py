"""Module docstrings say what the module is or does; none opens with a riddle."""

from __future__ import annotations

import ast
import re

from tree import ROOT

FOLDERS = ("ckpt", "elastic", "adapters", "tools", "src/holdfast", "tests", "docs")
RIDDLE = re.compile(r"(What|Who|Whom|Whose|How|Where|Whether|Which|Whatever|Whoever) [a-z]")


def test_no_module_docstring_opens_with_a_free_relative_clause() -> None:
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    opening = {
        path.relative_to(ROOT).as_posix(): (ast.get_docstring(ast.parse(path.read_text())) or "")
        for path in modules
    }
    assert len(opening) > 800
    riddles = {path: said.splitlines()[0] for path, said in opening.items() if RIDDLE.match(said)}
    assert riddles == {}
