"""Names with holes: they match a tensor's name, and make one from the holes' values. Pure.

``{layer}`` stands for a part of a name without dots, ``{name...}`` for any text, also none, and
``{rank:02}`` for a number of at least two digits. Everything else stands for itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from holdfast.ckpt.errors import ArgumentError

_HOLE: Final = re.compile(r"\{([a-z_][a-z0-9_]*)(\.\.\.|:0([1-9]))?\}")
_PLAIN: Final = r"[^.]+"
_ANY: Final = r".*"

NUMBER: Final = r"0|[1-9][0-9]*"
"""The expression for the text of a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTemplate:
    """A name with holes. ``digits`` are the least digits of the holes that are padded numbers."""

    text: str
    holes: tuple[str, ...]
    digits: Mapping[str, int]
    expression: re.Pattern[str]

    def match(self, name: str) -> dict[str, str] | None:
        """Return the holes' values in ``name``, padded numbers without padding; None: no match."""
        found = self.expression.fullmatch(name)
        if found is None:
            return None
        values = {hole: found[hole] for hole in self.holes}
        for hole in self.digits:
            values[hole] = str(int(values[hole]))
        return values if self.fill(values) == name else None

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with these values in its holes."""

        def value(hole: re.Match[str]) -> str:
            return values[hole[1]].zfill(self.digits.get(hole[1], 0))

        return _HOLE.sub(value, self.text)


def template(text: str, *, shapes: Mapping[str, str], label: str) -> NameTemplate:
    """Return the template of a text; ``shapes`` are regular expressions for holes.

    Raises ``ArgumentError`` for braces that are no hole, or an expression that is none.
    """
    at, said, holes, digits = 0, "", [], {}
    for hole in _HOLE.finditer(text):
        said += re.escape(text[at : hole.start()])
        name, at = hole[1], hole.end()
        if name in holes:
            said += f"(?P={name})"
            continue
        holes.append(name)
        if hole[3]:
            digits[name] = int(hole[3])
        usual = r"[0-9]+" if hole[3] else _ANY if hole[2] else _PLAIN
        said += f"(?P<{name}>{usual if hole[3] else shapes.get(name, usual)})"
    said += re.escape(text[at:])
    if re.search(r"[{}]", _HOLE.sub("", text)) or not text:
        raise ArgumentError(
            f"{label}: {text!r} is no name with holes; a hole is {{name}}, {{name...}} or "
            "{name:02}, in lower case"
        )
    try:
        expression = re.compile(said, re.DOTALL)
    except re.error as error:
        raise ArgumentError(
            f"{label}: {text!r}: a regular expression of `where` is wrong: {error}; correct it"
        ) from error
    return NameTemplate(text=text, holes=tuple(holes), digits=digits, expression=expression)
