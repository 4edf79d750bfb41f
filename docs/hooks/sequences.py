"""Sequence diagrams in Mermaid's notation, drawn as SVG without scripts and network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from typing import Final

LETTER: Final = 6.5
"""Upper bound of the mean width of a letter in the site's style, in pixels."""
LINE: Final = 17
MARGIN: Final = 24
HEAD: Final = 40
LEAST_GAP: Final = 110

_PARTICIPANT: Final = re.compile(r"participant (\w+)(?: as (.+))?")
_MESSAGE: Final = re.compile(r"(\w+)(--?>>)(\w+): ?(.+)")
_NOTE: Final = re.compile(r"Note over (\w+)(?:, ?(\w+))?: ?(.+)")
_FRAME: Final = re.compile(r"(loop|opt|alt|par) (.+)")


class DiagramError(ValueError):
    """A line of a diagram is outside the supported part of Mermaid's notation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A column of the diagram."""

    name: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An arrow between two columns, or from a column to itself."""

    source: str
    target: str
    lines: tuple[str, ...]
    dashed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A box of text over one column or several."""

    first: str
    last: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The beginning of a frame such as ``loop every step``."""

    kind: str
    title: str


@dataclass(frozen=True, slots=True)
class Branched:
    """A further branch of the innermost frame."""

    title: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of the innermost frame."""


Row = Message | Remark | Opened | Branched | Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """The columns and the rows of one diagram."""

    participants: tuple[Participant, ...]
    rows: tuple[Row, ...]


def parse(text: str) -> Diagram:
    """Return the diagram that ``text`` describes; its first line is ``sequenceDiagram``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or lines[0] != "sequenceDiagram":
        raise DiagramError(f"found {lines[:1]}, needed a first line `sequenceDiagram`")
    participants: list[Participant] = []
    rows: list[Row] = []
    depth = 0
    for line in lines[1:]:
        if found := _PARTICIPANT.fullmatch(line):
            participants.append(Participant(name=found[1], label=found[2] or found[1]))
            continue
        row = _row(line)
        depth += isinstance(row, Opened) - isinstance(row, Closed)
        rows.append(row)
    if depth:
        raise DiagramError(f"{depth} more frames begin than end: check the `end` lines")
    known = {each.name for each in participants}
    for row in rows:
        if unknown := _names(row) - known:
            raise DiagramError(f"{sorted(unknown)} in {row} are no participants")
    return Diagram(participants=tuple(participants), rows=tuple(rows))


def _row(line: str) -> Row:
    if found := _MESSAGE.fullmatch(line):
        return Message(
            source=found[1], target=found[3], lines=_lines(found[4]), dashed="--" in found[2]
        )
    if found := _NOTE.fullmatch(line):
        return Remark(first=found[1], last=found[2] or found[1], lines=_lines(found[3]))
    if found := _FRAME.fullmatch(line):
        return Opened(kind=found[1], title=found[2])
    if found := re.fullmatch(r"(?:else|and) (.+)", line):
        return Branched(found[1])
    if line == "end":
        return Closed()
    raise DiagramError(f"{line!r} is not in the part of Mermaid's notation that is drawn here")


def _lines(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r"<br ?/?>", text))


def _names(row: Row) -> set[str]:
    if isinstance(row, Message):
        return {row.source, row.target}
    if isinstance(row, Remark):
        return {row.first, row.last}
    return set()


def draw(diagram: Diagram, *, title: str) -> str:
    """Return the diagram as an ``svg`` element; its colours are classes of the site's style."""
    columns = _columns(diagram)
    names = [each.name for each in diagram.participants]
    width = columns[names[-1]] + _half(diagram.participants[-1]) + MARGIN
    width = max(width, _reach(diagram, columns) + MARGIN)
    body: list[str] = []
    height = _rows(diagram, columns, body, width=width)
    lanes = [
        f'<path class="lane" d="M{columns[name]:.0f} {MARGIN + HEAD}V{height + 8}"/>'
        for name in names
    ]
    heads = [_head(each, columns[each.name]) for each in diagram.participants]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sequence" role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height + MARGIN}" '
        f'width="{width:.0f}" height="{height + MARGIN}">' + "".join([*lanes, *heads, *body])
    ) + "</svg>"


def _half(participant: Participant) -> float:
    return max(len(participant.label) * LETTER + 24, 90) / 2


def _wide(lines: tuple[str, ...]) -> float:
    return max(len(line) for line in lines) * LETTER


def _columns(diagram: Diagram) -> dict[str, float]:
    """Return the centre of each column; messages between neighbours fit between them."""
    order = {each.name: number for number, each in enumerate(diagram.participants)}
    gaps = [float(LEAST_GAP)] * len(diagram.participants)
    for left, (one, two) in enumerate(
        zip(diagram.participants, diagram.participants[1:], strict=False)
    ):
        gaps[left] = max(gaps[left], _half(one) + _half(two) + 16)
    for row in diagram.rows:
        if isinstance(row, Message):
            ends = sorted((order[row.source], order[row.target]))
            if ends[0] == ends[1]:
                ends[1] = min(ends[0] + 1, len(gaps) - 1)
                need = 0.55 * _wide(row.lines) + 44  # the rest may cross a lane: it has a halo
            else:
                need = _wide(row.lines) + 24
            span = range(ends[0], ends[1])
            lack = need - sum(gaps[each] for each in span)
            if span and lack > 0:
                for each in span:
                    gaps[each] += lack / len(span)
    places: dict[str, float] = {}
    at = MARGIN + _half(diagram.participants[0])
    for one, gap in zip(diagram.participants, gaps, strict=True):
        places[one.name] = at
        at += gap
    return places


def _reach(diagram: Diagram, columns: dict[str, float]) -> float:
    """Return the right edge of the texts of self-messages and notes."""
    ends = [0.0]
    for row in diagram.rows:
        if isinstance(row, Message) and row.source == row.target:
            ends.append(columns[row.source] + 44 + _wide(row.lines))
        if isinstance(row, Remark):
            middle = (columns[row.first] + columns[row.last]) / 2
            ends.append(middle + _wide(row.lines) / 2 + 12)
    return max(ends)


def _head(participant: Participant, middle: float) -> str:
    half = _half(participant)
    return (
        f'<rect class="head" x="{middle - half:.0f}" y="{MARGIN}" width="{2 * half:.0f}" '
        f'height="{HEAD}" rx="6"/>' + _text(participant.label, middle, MARGIN + 25, "label")
    )


def _text(text: str, x: float, y: float, kind: str, anchor: str = "middle") -> str:
    return (
        f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rows(diagram: Diagram, columns: dict[str, float], body: list[str], *, width: float) -> float:
    """Append the drawing of every row to ``body``; return the bottom of the last one."""
    y = float(MARGIN + HEAD + 10)
    frames: list[tuple[float, int]] = []
    for row in diagram.rows:
        if isinstance(row, Opened):
            y += 10
            frames.append((y, len(body)))
            body.append("")
            kind = len(row.kind) * LETTER + 14
            inset = MARGIN / 2 + 6 * (len(frames) - 1)
            body.append(
                f'<rect class="kind" x="{inset:.0f}" y="{y:.0f}" width="{kind:.0f}" height="20"/>'
            )
            body.append(_text(row.kind, inset + kind / 2, y + 14, "strong"))
            body.append(_text(row.title, inset + kind + 8, y + 14, "soft", "start"))
            y += 24
        elif isinstance(row, Branched):
            inset = MARGIN / 2 + 6 * (len(frames) - 1)
            y += 8
            body.append(f'<path class="branch" d="M{inset:.0f} {y:.0f}H{width - inset:.0f}"/>')
            body.append(_text(row.title, inset + 8, y + 15, "soft", "start"))
            y += 22
        elif isinstance(row, Closed):
            top, place = frames.pop()
            inset = MARGIN / 2 + 6 * len(frames)
            y += 8
            body[place] = (
                f'<rect class="frame" x="{inset:.0f}" y="{top:.0f}" '
                f'width="{width - 2 * inset:.0f}" height="{y - top:.0f}"/>'
            )
            y += 6
        elif isinstance(row, Remark):
            y = _remark(row, columns, body, y)
        else:
            y = _message(row, columns, body, y)
    return y


def _remark(row: Remark, columns: dict[str, float], body: list[str], y: float) -> float:
    left, right = columns[row.first], columns[row.last]
    half = max(_wide(row.lines) / 2 + 8, abs(right - left) / 2 + 20)
    middle = (left + right) / 2
    height = LINE * len(row.lines) + 10
    y += 8
    body.append(
        f'<rect class="note" x="{max(middle - half, 2):.0f}" y="{y:.0f}" '
        f'width="{2 * half:.0f}" height="{height}" rx="4"/>'
    )
    for number, line in enumerate(row.lines):
        body.append(_text(line, middle, y + 17 + LINE * number, "text"))
    return y + height + 4


def _message(row: Message, columns: dict[str, float], body: list[str], y: float) -> float:
    dashed = " dashed" if row.dashed else ""
    source, target = columns[row.source], columns[row.target]
    if source == target:
        y += 12
        for number, line in enumerate(row.lines):
            body.append(_text(line, source + 40, y + 13 + LINE * number, "text", "start"))
        drop = max(LINE * len(row.lines), 18)
        body.append(
            f'<path class="arrow{dashed}" '
            f'd="M{source:.0f} {y:.0f}h32v{drop:.0f}H{source + 8:.0f}"/>'
        )
        body.append(_point(source, y + drop, -1))
        return y + drop + 6
    for line in row.lines:
        y += LINE
        body.append(_text(line, (source + target) / 2, y + 4, "text"))
    y += 11
    way = 1 if target > source else -1
    body.append(f'<path class="arrow{dashed}" d="M{source:.0f} {y:.0f}H{target - way * 8:.0f}"/>')
    body.append(_point(target, y, way))
    return y + 5


def _point(x: float, y: float, way: int) -> str:
    return f'<path class="point" d="M{x:.0f} {y:.0f}l{-9 * way} -5v10z"/>'
