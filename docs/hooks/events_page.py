"""The reference page of events, generated from their structs: fields, units, meanings."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import Final

from holdfast.elastic import events
from holdfast.elastic.events import KINDS, Event, UserEvent

_SECTIONS: Final = {
    "holdfast.elastic.events.job": "Jobs, nodes, workers and faults",
    "holdfast.elastic.events.training": "Steps, snapshots, restores and data",
    "holdfast.ckpt.events": "Checkpoints",
    "holdfast.elastic.events.rollouts": "Reinforcement learning",
    "holdfast.elastic.events.islands": "Islands",
}
_TYPES: Final = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_UNITS: Final = {
    "per_s": "bytes/s",
    "s": "s",
    "seconds": "s",
    "bytes": "bytes",
    "tokens": "tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldDoc:
    """A field of a kind: its JSON type, its unit, its meaning."""

    name: str
    type: str
    unit: str
    meaning: str


def events_page() -> str:
    """Return the page as Markdown."""
    lines = ["# Events", "", *_prose(inspect.getdoc(events) or ""), ""]
    lines += ["## Fields of every event", "", *_table(fields_of(Event), kind=True), ""]
    for module, title in _SECTIONS.items():
        lines += [f"## {title}", ""]
        for name, kind in KINDS.items():
            if kind.__module__ == module:
                lines += [f"### `{name}`", "", *_prose(sentence_of(kind)), ""]
                lines += [f"Struct: `holdfast.elastic.events.{kind.__name__}`.", ""]
                own = fields_of(kind)[len(fields_of(Event)) :]
                lines += [*_table(own), ""] if own else []
    lines += ["## Events of your own", "", *_prose(sentence_of(UserEvent)), ""]
    return "\n".join(lines)


def sentence_of(kind: type[Event]) -> str:
    """Return the docstring of a kind itself, "" if it has none."""
    return inspect.cleandoc(vars(kind).get("__doc__") or "")


def fields_of(kind: type[Event]) -> list[FieldDoc]:
    """Return the fields of a kind; the fields of every event come first."""
    found: dict[str, FieldDoc] = {}
    for each in reversed(kind.__mro__):
        if isinstance(each, type) and issubclass(each, Event):
            for field in _own_fields(each):
                found[field.name] = field
    return list(found.values())


def _own_fields(kind: type[Event]) -> Iterator[FieldDoc]:
    body = _classes(sys.modules[kind.__module__])[kind.__name__].body
    for at, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = body[at + 1] if at + 1 < len(body) else None
            yield FieldDoc(
                name=node.target.id,
                type=_type(node.annotation),
                unit=_unit(node.target.id),
                meaning=_literal(after),
            )


@cache
def _classes(module: ModuleType) -> dict[str, ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _literal(node: ast.stmt | None) -> str:
    """Return the string that documents a field: the statement after it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return inspect.cleandoc(str(node.value.value))
    return ""


def _type(node: ast.expr) -> str:
    """Return the JSON name of a Python type."""
    text = ast.unparse(node)
    if text.endswith(" | None"):
        return f"{_type_of(text.removesuffix(' | None'))} or null"
    return _type_of(text)


def _type_of(text: str) -> str:
    if found := re.fullmatch(r"tuple\[(\w+), \.\.\.\]", text):
        return f"array of {_TYPES[found[1]]}s"
    if text.startswith("dict["):
        return "object"
    return _TYPES[text]


def _unit(name: str) -> str:
    for ending, unit in _UNITS.items():
        if name == ending or name.endswith(f"_{ending}"):
            return unit
    return ""


def _prose(text: str) -> list[str]:
    """Return a docstring as Markdown, with its examples as code blocks."""
    lines: list[str] = []
    for is_code, blocks in groupby(
        text.replace("``", "`").split("\n\n"), key=lambda block: block.startswith("    ")
    ):
        whole = textwrap.dedent("\n\n".join(blocks)).splitlines()
        lines += ["```python", *whole, "```", ""] if is_code else [*whole, ""]
    return lines[:-1]


def _table(fields: list[FieldDoc], *, kind: bool = False) -> list[str]:
    rows = ["| field | type | unit | meaning |", "|---|---|---|---|"]
    if kind:
        rows.append("| `kind` | string | | Name of the event's kind: one of those below. |")
    for field in fields:
        meaning = " ".join(field.meaning.replace("``", "`").split())
        rows.append(f"| `{field.name}` | {field.type} | {field.unit} | {meaning} |")
    return rows
