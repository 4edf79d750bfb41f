"""A contract of import-linter holds for all modules that are declared pure."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from tree import ROOT

FOLDERS = ("ckpt", "elastic", "adapters", "tools")
SAYS_PURE = re.compile(r"\bPure(?:\s+\w+)*[.:;]")


def contracts() -> list[dict[str, object]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [
        each
        for each in settings["tool"]["importlinter"]["contracts"]
        if each["type"] == "forbidden" and each["name"].startswith("Pure")
    ]


def held() -> list[str]:
    """Return the expressions of all modules that a contract holds pure."""
    return [module for each in contracts() for module in each["source_modules"]]  # type: ignore[attr-defined]


def is_held(module: str) -> bool:
    return any(fnmatchcase(module, each.replace("**", "*")) for each in held())


def pure_by_their_word() -> Iterator[str]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            said = ast.get_docstring(ast.parse(path.read_text())) or ""
            if SAYS_PURE.search(said.partition("\n\n")[0]):
                yield "holdfast." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_module_that_says_it_is_pure_is_held_by_a_contract() -> None:
    found = list(pure_by_their_word())
    assert len(found) > 50
    assert [module for module in found if not is_held(module)] == []


def test_the_folders_of_decisions_and_arithmetic_are_pure_as_a_whole() -> None:
    whole = {each.removesuffix(".**") for each in held() if each.endswith(".**")}
    assert whole >= {
        "holdfast.ckpt.geometry",
        "holdfast.elastic.membership",
        "holdfast.elastic.planning",
        "holdfast.elastic.decisions",
        "holdfast.adapters.rl.ledger",
        "holdfast.tools.report",
    }


def test_all_contracts_of_purity_forbid_the_same() -> None:
    first, *others = [each["forbidden_modules"] for each in contracts()]
    assert others
    assert all(each == first for each in others)
