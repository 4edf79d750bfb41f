"""The public names of reinforcement learning are loaded one by one, when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys

from tree import ROOT

import holdfast.rl

LIGHT = """
import sys
from holdfast.rl import Action, Observation, ToolError
assert "torch" not in sys.modules, "an environment process needs no torch"
"""


def test_an_environment_imports_its_names_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_names_for_type_checkers_are_those_that_are_loaded() -> None:
    tree = ast.parse((ROOT / "src/holdfast/rl/__init__.py").read_text())
    (branch,) = (each for each in tree.body if isinstance(each, ast.If))
    imported = {
        (each.module, alias.name)
        for each in branch.body
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    (listed,) = (ast.literal_eval(e.value) for e in branch.body if isinstance(e, ast.Assign))
    assert sorted(name for _, name in imported) == sorted(listed)
    assert sorted(listed) == sorted(holdfast.rl.__all__)
    for module, name in imported:
        found = getattr(holdfast.rl, name)
        assert getattr(sys.modules[str(module)], name) is found
