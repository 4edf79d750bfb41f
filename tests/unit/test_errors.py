"""One tree of errors: every class has a stable code, a meaning and a remedy."""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hooks.errors_page import errors_page, listed, meaning
from tree import ROOT

import holdfast
from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.errors import Stopped
from holdfast.elastic.testing.seas.tasks import Killed
from holdfast.tools.cli import Terminated

CODES: Final = ROOT / "tests/format/error_codes.txt"
CONTROL_FLOW: Final = {Killed, Stopped, Terminated}
PACKAGES: Final = ("ckpt", "elastic", "adapters", "tools")


def defined() -> list[type]:
    """Return every exception class of the product, found in the source by its bases."""
    names = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    classes = [each for package in PACKAGES for each in _classes(ROOT / package)]
    count = -1
    while count != len(names):
        count = len(names)
        names |= {name for _, name, bases in classes if bases & names}
    modules = {(module, name) for module, name, bases in classes if bases & names}
    return [getattr(importlib.import_module(module), name) for module, name in sorted(modules)]


def _classes(folder: Path) -> Iterator[tuple[str, str, set[str]]]:
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(("holdfast", *path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield module, node.name, {ast.unparse(base).split(".")[-1] for base in node.bases}


@pytest.fixture(scope="module")
def errors() -> list[type]:
    return [kind for kind in defined() if kind not in CONTROL_FLOW]


def test_the_root_is_public() -> None:
    assert holdfast.HoldfastError is HoldfastError


def test_every_exception_is_a_holdfast_error_and_named_so(errors: list[type]) -> None:
    assert len(errors) > 40
    assert [kind for kind in errors if not issubclass(kind, HoldfastError)] == []
    assert [kind for kind in errors if not kind.__name__.endswith("Error")] == []


def test_a_stop_passes_handlers_of_errors() -> None:
    assert not issubclass(Stopped, HoldfastError)


def test_every_error_has_a_code_a_meaning_of_one_sentence_and_a_remedy(errors: list[type]) -> None:
    own = {kind for kind in errors if {"code", "remedy"} & vars(kind).keys()}
    assert own == set(listed())
    for kind in listed():
        assert {"code", "remedy"} <= vars(kind).keys(), kind
        for text in (meaning(kind), kind.remedy):
            assert text.endswith("."), (kind, text)
            assert "|" not in text, (kind, text)
        assert ". " not in meaning(kind), kind


def test_codes_are_only_appended() -> None:
    """Append a line for a new error; where a class goes, its line stays, with ``-`` for a name."""
    lines = [line.split() for line in CODES.read_text().splitlines()]
    assert [code for code, _ in lines] == [f"HF{n:03}" for n in range(1, len(lines) + 1)]
    kept = [(code, name) for code, name in lines if name != "-"]
    assert [(kind.code, kind.__name__) for kind in listed()] == kept


def test_the_page_lists_code_class_meaning_and_remedy() -> None:
    page = errors_page()
    for kind in listed():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {kind.code} |")]
        assert f"| `{kind.__name__}`" in row
        assert row.endswith(f"| {meaning(kind)} | {kind.remedy} |")
    assert "`BudgetError`, a `CapacityError`" in page
