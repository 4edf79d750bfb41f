"""The import graph: a contract forbids cycles, and no package is a catch-all."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from tree import ROOT

FOLDERS = ("ckpt", "elastic", "adapters", "tools")
MOST = 16
"""Modules that one package holds, beside its ``__init__``."""


def modules_of(folder: Path) -> int:
    return sum(path.name != "__init__.py" for path in folder.glob("*.py"))


def test_no_package_holds_more_modules_than_one_can_oversee() -> None:
    found = Counter(
        {
            folder.relative_to(ROOT).as_posix(): modules_of(folder)
            for top in FOLDERS
            for folder in (ROOT / top, *(ROOT / top).rglob("*"))
            if folder.is_dir()
        }
    )
    assert {name: count for name, count in found.items() if count > MOST} == {}


def test_a_contract_forbids_cycles_and_counts_imports_for_types_only() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert settings["exclude_type_checking_imports"] is False
    (contract,) = [each for each in settings["contracts"] if each["type"] == "acyclic_siblings"]
    assert contract["ancestors"] == ["holdfast"]
    assert "depth" not in contract, "the default goes down to every module"
    assert "ignore_imports" not in contract
