"""Docstrings and documents say what a thing is or does; no sentence of them opens with a riddle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from tree import ROOT

FOLDERS: Final = ("ckpt", "elastic", "adapters", "tools", "src/holdfast", "tests", "docs")
WORDS: Final = r"(?:What|Who|Whom|Whose|How|Where|Which|Whatever|Whoever|Wherever) [a-z]"
SENTENCE: Final = re.compile(rf"(?:^|(?<=[.:?!])\s|\n[ \t]*\n)\s*({WORDS}[^.?!]*[.?!]?)")
"""A sentence with such an opening, at the start of a text, of a paragraph or after a sentence."""

BLOCK: Final = re.compile(r"```.*?```", re.DOTALL)
ITEM: Final = re.compile(r"\s*(?:[-*>]|\d+\.) +")
"""The mark of an item of a list or of a quotation."""


def riddles(text: str) -> list[str]:
    """Return the sentences that open with a free relative clause, questions left out."""
    found = [" ".join(match.split()) for match in SENTENCE.findall(text)]
    return [sentence for sentence in found if not sentence.endswith("?")]


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, and those after attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        said = [each.value for each in node.body if isinstance(each, ast.Expr)]
        constants = [each.value for each in said if isinstance(each, ast.Constant)]
        yield from (each for each in constants if isinstance(each, str))


def prose(markdown: str) -> str:
    """Return the sentences of a document; its code, tables, headings and marks are left out."""
    lines = BLOCK.sub("", markdown).splitlines()
    plain = ["" if line.lstrip().startswith(("#", "|")) else line for line in lines]
    return "\n".join(ITEM.sub("\n", line.replace("**", "")) for line in plain)


@functools.cache
def told() -> dict[Path, list[str]]:
    """Return the docstrings of all modules."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {path: [*docstrings(ast.parse(path.read_text()))] for path in paths}


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_no_docstring_has_a_sentence_that_opens_with_a_free_relative_clause() -> None:
    found = {}
    for path, texts in told().items():
        if odd := [r for each in texts for r in riddles(each)]:
            found[path.relative_to(ROOT).as_posix()] = odd
    assert len(told()) > 800
    assert found == {}


def test_no_docstring_opens_with_whether() -> None:
    """It says what holds, or what is said."""
    opening = [each for texts in told().values() for each in texts]
    assert [text for text in opening if text.startswith("Whether ")] == []


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_no_sentence_of_a_document_opens_with_a_free_relative_clause(path: Path) -> None:
    assert riddles(prose(path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("What a rank holds.", True),
        ("A rank.\n\nWho holds it is told.", True),
        ("It is so. Whatever comes stays.", True),
        ("What is a rank?", False),
        ("A rank. What is it?", False),
        ("It says what a rank is.", False),
        ("- **What a script prints**, and more.", True),
        ("## What is compared\n\nRuns are.", False),
        ("1. Where a step ends, another begins.", True),
    ],
)
def test_the_search_finds_openings_and_leaves_questions_and_headings(text: str, odd: bool) -> None:
    assert bool(riddles(prose(text))) is odd
