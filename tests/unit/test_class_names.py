"""One word, one class: no two classes of the product share a name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree import ROOT

FOLDERS = ("ckpt", "elastic", "adapters", "tools")


def test_no_two_classes_share_a_name() -> None:
    found = defaultdict(list)
    for path in (each for folder in FOLDERS for each in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 800
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
