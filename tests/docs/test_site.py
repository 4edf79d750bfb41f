"""The documentation site: every page in the navigation, every public name and option documented."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hooks import api, commands, packages, sequences
from hooks.errors_page import errors_page
from hooks.events_page import events_page

from holdfast.tools import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DIAGRAMS = [
    pytest.param(found, id=f"{path.stem} {number}")
    for path in sorted(DOCS.rglob("*.md"))
    for number, found in enumerate(
        re.findall(r"^```mermaid\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    )
]


def named(entry: str | list[Any] | dict[str, Any]) -> set[str]:
    """Return the pages below one entry of the site's navigation."""
    if isinstance(entry, str):
        return {entry}
    inner = entry.values() if isinstance(entry, dict) else entry
    return {page for each in inner for page in named(each)}


def test_every_public_name_is_documented() -> None:
    assert api.undocumented() == []


def test_a_public_name_without_a_docstring_stops_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast import chaos

    monkeypatch.setattr(chaos.step, "__doc__", None)
    with pytest.raises(api.UndocumentedError, match=r"holdfast\.chaos\.step"):
        api.pages()


def test_every_public_name_has_one_entry() -> None:
    pages = api.pages()
    entries = [found for text in pages.values() for found in re.findall(r"^::: (.+)", text, re.M)]
    assert len(set(entries)) == len(entries)
    for face in api.FACES:
        page = pages[f"reference/api/{face}.md"]
        for name in api.names_of(face):
            assert f"::: {face}.{name}\n" in page or f"[`{name}`]" in page


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_page_of_a_command_has_every_option(command: str) -> None:
    page = commands.page(command)
    top = cli.build_parser(command, cli.load(command))
    parsers = [commands.inner(top)[command]]
    parsers += commands.inner(parsers[0]).values()
    for parser in parsers:
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                for option in set(action.option_strings) - {"-h", "--help"}:
                    assert option in page


def test_every_package_says_what_it_is_for() -> None:
    found = packages.sentences(ROOT)
    assert len(found) > 50
    assert [name for name, said in found.items() if not said] == []


def test_the_pages_of_events_and_errors_have_those_of_the_code() -> None:
    page = events_page()
    for kind in ("detected", "fenced", "proposed", "restored", "protected"):
        assert f"### `{kind}`" in page
    for name in ("CorruptError", "ConfigError", "ScenarioError"):
        assert f"| `{name}`" in errors_page()


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    made = {*api.pages(), *commands.pages(), *packages.pages(ROOT)}
    made |= {"reference/events.md", "reference/errors.md"}
    assert named(site["nav"]) == written | made


@pytest.mark.parametrize("text", DIAGRAMS)
def test_a_diagram_of_the_documents_is_drawn(text: str) -> None:
    diagram = sequences.parse(text)
    drawn = sequences.draw(diagram, title="a diagram")
    for each in diagram.participants:
        assert each.label in drawn
    assert drawn.count('class="point"') == sum(
        isinstance(row, sequences.Message) for row in diagram.rows
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a->b: no such arrow", "not in the part"),
        ("a->>c: nobody knows c", "no participants"),
        ("loop for ever", "more frames begin"),
    ],
)
def test_a_wrong_line_of_a_diagram_is_refused(line: str, said: str) -> None:
    with pytest.raises(sequences.DiagramError, match=said):
        sequences.parse(f"sequenceDiagram\nparticipant a\nparticipant b\n{line}\n")


def test_a_diagram_has_its_texts_and_escapes_them() -> None:
    diagram = sequences.parse(
        "sequenceDiagram\nparticipant a as One & all\nparticipant b\n"
        "loop as often as it takes\na->>b: x < y<br/>second line\nb-->>a: done\na->>a: again\nend\n"
        "alt this\nNote over a,b: both\nelse that\na->>b: other\nend\n"
    )
    drawn = sequences.draw(diagram, title="t")
    for text in (
        "One &amp; all",
        "x &lt; y",
        "second line",
        "both",
        "that",
        "as often as it takes",
    ):
        assert f">{text}</text>" in drawn
