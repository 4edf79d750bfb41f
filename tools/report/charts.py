"""The pictures of the report: functions from plain values to SVG text. Pure.

Colours are classes; the page's style sheet defines each for light and dark mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from holdfast.tools.report.record import RecoveryRow
from holdfast.tools.report.svg import Scale, drawing, marks, tag, text, titled
from holdfast.tools.report.timeline import PHASES, Fault, Life, StepRun, Timeline

WIDTH: Final = 1080.0
CURVE_WIDTH: Final = 520.0
CURVE_HEIGHT: Final = 254.0
_NODE_CHAR: Final = 7.4  # width in pixels of a character of a node's name, and of a seat's
_SEAT_CHAR: Final = 6.4
_GAP: Final = 8.0
_RIGHT: Final = 14.0
_LANE: Final = 26.0
_BAR: Final = 16.0
_TOP: Final = 40.0
_DOTS_UP_TO: Final = 40
_SUMMED_S: Final = 1e-6  # tolerated rounding error in the sum of the phases

PHASE_NAMES: Final = {
    "detect_s": "detect",
    "agree_s": "agree",
    "reform_s": "re-form",
    "restore_s": "restore",
    "reexecute_s": "re-execute",
}


def timeline(story: Timeline, *, era: str = "generation") -> str:
    """Draw nodes and workers as lanes over time: steps, faults, recoveries, generations.

    ``era`` is the name of the span between two changes: "attempt" for a job without generations.
    """
    lanes, node_rows, bottom = _lanes(story)
    x = Scale(domain=(0.0, max(story.wall_s, 0.001)), range=(_left(lanes), WIDTH - _RIGHT))
    parts = [_axis(x, bottom), *_generations(story, x, bottom, era), *_recoveries(story, x, bottom)]
    for node, (start, end) in node_rows.items():
        parts.append(tag("line", x1=0, x2=WIDTH, y1=start - 5, y2=start - 5, class_="rule"))
        if node:
            parts.append(text(0, (start + end) / 2 + 4, _node_name(node), class_="node"))
    parts += [_seat_name(seat, x, y) for (_, seat), y in lanes.items()]
    parts += [_life(life, x, lanes) for life in story.lives]
    parts += [_step(run, x, lanes) for run in story.steps]
    parts += [_fault(fault, x, lanes, node_rows) for fault in story.faults]
    return drawing(WIDTH, bottom + 26, "".join(parts), label="timeline of the job")


Lanes = Mapping[tuple[str, str], float]


def _lanes(story: Timeline) -> tuple[Lanes, dict[str, tuple[float, float]], float]:
    """Return the top of every (node, seat) lane, the extent of every node, and the bottom."""
    places = {(life.node, life.seat) for life in story.lives}
    places |= {(run.node, run.seat) for run in story.steps}
    lanes: dict[tuple[str, str], float] = {}
    extents: dict[str, tuple[float, float]] = {}
    at = _TOP
    for node in sorted({node for node, _ in places}):
        start = at
        for seat in sorted((s for n, s in places if n == node), key=_trainers_first):
            lanes[node, seat] = at
            at += _LANE
        extents[node] = (start, at - _LANE + _BAR)
        at += 8
    return lanes, extents, at


def _left(lanes: Lanes) -> float:
    """Return the left edge of the lanes, to the right of the longest names."""
    nodes = max((len(_node_name(node)) for node, _ in lanes if node), default=0)
    seats = max((len(seat) for _, seat in lanes), default=0)
    return nodes * _NODE_CHAR + _GAP + seats * _SEAT_CHAR + _GAP


def _node_name(node: str) -> str:
    return f"node {node}"


def _trainers_first(seat: str) -> tuple[bool, str]:
    return not seat.startswith("trainer"), seat


def _axis(x: Scale, bottom: float) -> str:
    parts = []
    for mark in marks(*x.domain, about=10):
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=_TOP - 8, y2=bottom, class_="grid"))
        parts.append(text(x(mark), bottom + 15, f"{mark:g} s", class_="mark", text_anchor="middle"))
    return "".join(parts)


def _generations(story: Timeline, x: Scale, bottom: float, era: str) -> list[str]:
    parts, free = [], -1.0
    for span in story.generations:
        at = x(span.proposed_s)
        words = f"{era} {span.number}, {span.world} trainers: {span.reason}"
        line = tag("line", titled(words), x1=at, x2=at, y1=18, y2=bottom, class_="generation")
        parts.append(line)
        if at >= free:
            parts.append(text(at + 4, 26, f"{era[0]}{span.number}", class_="glabel"))
            free = at + 26
    return parts


def _recoveries(story: Timeline, x: Scale, bottom: float) -> list[str]:
    parts = []
    for recovery in story.recoveries:
        if recovery.total_s is None or recovery.generation is None:
            continue
        start, end = x(recovery.time_s), x(recovery.time_s + recovery.total_s)
        words = f"recovery from {recovery.kind} of {recovery.victim}: {recovery.total_s:.2f} s"
        box = {"x": start, "y": _TOP - 8, "width": max(end - start, 2.0), "height": bottom - _TOP}
        parts.append(tag("rect", titled(words), class_="band", **box))
    return parts


def _life(life: Life, x: Scale, lanes: Lanes) -> str:
    role = "trainer" if life.seat.startswith("trainer") else "rollout"
    y = lanes[life.node, life.seat]
    words = f"{life.seat} on {life.node}, attempt {life.attempt}, pid {life.pid}: {life.ending}"
    start, end = x(life.start_s), x(life.end_s)
    return tag(
        "rect",
        titled(words),
        x=start,
        y=y,
        width=max(end - start, 1.5),
        height=_BAR,
        rx=3,
        class_=f"life {role}",
    )


def _seat_name(seat: str, x: Scale, y: float) -> str:
    return text(x.range[0] - _GAP, y + _BAR - 4, seat, class_="seat", text_anchor="end")


def _step(run: StepRun, x: Scale, lanes: Lanes) -> str:
    start, end = x(run.start_s), x(run.end_s)
    fate = "" if run.stands else ", lost with its generation and done again"
    words = f"step {run.step}, generation {run.generation}, rank {run.rank}{fate}"
    return tag(
        "rect",
        titled(words),
        x=start,
        y=lanes[run.node, run.seat] + 2,
        width=max(end - start - 0.6, 0.8),
        height=_BAR - 4,
        rx=1.5,
        class_="step" if run.stands else "step lost",
    )


def _fault(fault: Fault, x: Scale, lanes: Lanes, nodes: Mapping[str, tuple[float, float]]) -> str:
    at = x(fault.time_s)
    words = f"{fault.kind.replace('_', ' ')}: {fault.victim} at {fault.time_s:.2f} s"
    if fault.victim in nodes:
        top, bottom = nodes[fault.victim]
        line = tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="deathline")
        middle = (top + bottom) / 2
    else:
        line, middle = "", lanes.get((fault.node, fault.victim), _TOP) + _BAR / 2
    cross = tag(
        "path",
        d=f"M{at - 6:.1f} {middle - 6:.1f}l12 12m0 -12l-12 12",
        class_="fault",
    )
    halo = tag("circle", cx=at, cy=middle, r=10, class_="halo")
    return tag("g", titled(words) + line + halo + cross)


def recovery_bars(rows: Sequence[RecoveryRow]) -> str:
    """Draw each recovery as one bar, its phases stacked in their order."""
    left, right, height = 190.0, 90.0, 34.0
    longest = max((row.total_s for row in rows), default=1.0) or 1.0
    x = Scale(domain=(0.0, longest), range=(left, WIDTH - right))
    bottom = 10 + height * len(rows)
    parts = []
    for mark in marks(0.0, longest, about=8):
        parts.append(tag("line", x1=x(mark), x2=x(mark), y1=4, y2=bottom, class_="grid"))
        parts.append(text(x(mark), bottom + 15, f"{mark:g} s", class_="mark", text_anchor="middle"))
    for at, row in enumerate(rows):
        y = 10 + height * at
        label = f"{row.fault.replace('_', ' ')} · {row.victim}"
        parts.append(text(left - 10, y + 15, label, class_="seat", text_anchor="end"))
        parts += _stack(row, x, y)
        words = f"{row.total_s:.2f} s"
        parts.append(text(x(row.total_s) + 8, y + 15, words, class_="value"))
    return drawing(WIDTH, bottom + 22, "".join(parts), label="recoveries by phase")


def _stack(row: RecoveryRow, x: Scale, y: float) -> list[str]:
    parts, done_s = [], 0.0
    phases = [(phase, float(getattr(row, phase))) for phase in PHASES]
    if (rest_s := row.total_s - sum(seconds for _, seconds in phases)) > _SUMMED_S:
        phases.insert(len(phases) if row.generation is None else 0, ("handed_on", rest_s))
    for phase, seconds in phases:
        if seconds <= 0.0:
            continue
        start, end = x(done_s), x(done_s + seconds)
        name = PHASE_NAMES.get(phase, "hand on" if row.generation is None else "phase unknown")
        parts.append(
            tag(
                "rect",
                titled(f"{name} {seconds:.3f} s"),
                x=start,
                y=y,
                width=max(end - start - 0.8, 0.8),
                height=22,
                rx=2,
                class_=f"phase {phase.removesuffix('_s')}",
            )
        )
        done_s += seconds
    return parts


def share_bar(shares: Mapping[str, float]) -> str:
    """Draw the classes of wall time as one bar, productive time first."""
    order = sorted(shares, key=lambda name: (name != "productive", -shares[name]))
    total = sum(shares.values()) or 1.0
    x = Scale(domain=(0.0, total), range=(0.0, WIDTH))
    parts, at = [], 0.0
    for name in order:
        if shares[name] <= 0.0:
            continue
        start, end = x(at), x(at + shares[name])
        words = f"{name}: {shares[name]:.2f} s, {shares[name] / total:.1%}"
        parts.append(
            tag(
                "rect",
                titled(words),
                x=start,
                y=0,
                width=max(end - start - 1.0, 0.8),
                height=34,
                rx=3,
                class_=f"share {share_class(name)}",
            )
        )
        if end - start > 60:
            words = f"{shares[name] / total:.1%}"
            parts.append(text((start + end) / 2, 22, words, class_="inside", text_anchor="middle"))
        at += shares[name]
    return drawing(WIDTH, 34, "".join(parts), label="shares of wall time")


def share_class(name: str) -> str:
    """Return the style class of a class of time."""
    return "s-" + name.replace(" ", "-")


def curve(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    label: str,
    faults: Sequence[float] = (),
) -> str:
    """Draw lines over steps and mark the faults; each series' name is its style class."""
    if not any(series.values()):
        words = text(44.0, 24, "nothing measured", class_="mark")
        return drawing(CURVE_WIDTH, 40, words, label=label)
    return drawing(CURVE_WIDTH, CURVE_HEIGHT, plot(series, faults=faults), label=label)


def plot(
    series: Mapping[str, Sequence[tuple[float, float]]], *, faults: Sequence[float] = ()
) -> str:
    """Return the content of `curve`, for an area of `CURVE_WIDTH` by `CURVE_HEIGHT`."""
    width, left, bottom = CURVE_WIDTH, 44.0, 208.0
    points = [point for line in series.values() for point in line]
    steps = [step for step, _ in points]
    x = Scale(domain=(min(0.0, *steps), max(steps)), range=(left, width - 12))
    values = [value for _, value in points]
    low, high = min(0.0, *values), max(values)
    y = Scale(domain=(low, high + 0.08 * ((high - low) or 1.0)), range=(bottom, 12.0))
    parts = []
    for mark in marks(*y.domain, about=5):
        parts.append(tag("line", x1=left, x2=width - 12, y1=y(mark), y2=y(mark), class_="grid"))
        words = f"{mark:g}"
        parts.append(text(left - 8, y(mark) + 4, words, class_="mark", text_anchor="end"))
    for mark in marks(*x.domain, about=6):
        place = x(mark)
        parts.append(text(place, bottom + 18, f"{mark:g}", class_="mark", text_anchor="middle"))
    parts.append(text((left + width) / 2, bottom + 36, "step", class_="mark", text_anchor="middle"))
    for step in faults:
        parts.append(tag("line", x1=x(step), x2=x(step), y1=12, y2=bottom, class_="deathline"))
    for name, line in series.items():
        path = "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in line)
        parts.append(tag("path", d=path, class_=f"curve {name}"))
        if len(line) <= _DOTS_UP_TO:
            parts += [tag("circle", cx=x(s), cy=y(v), r=3, class_=f"dot {name}") for s, v in line]
    return "".join(parts)
