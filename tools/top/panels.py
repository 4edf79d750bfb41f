"""The panels of a run: a view as texts and rows, without anything of the terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from rich.text import Text

from holdfast.tools.live.view import CheckpointView, NodeView, RecoveryView, RunMessage, RunView
from holdfast.tools.printing import printable
from holdfast.tools.terminal import readable
from holdfast.tools.top.wording import (
    NONE,
    PHASES,
    clock,
    number,
    share,
    span,
    step_of,
    trainers,
)

MOST_ROWS: Final = 400
"""Rows of a table at most; of nodes those in trouble come first."""

_COLOURS: Final = {
    "training": "green",
    "done": "green",
    "restoring": "yellow",
    "recovering": "yellow",
    "starting": "cyan",
    "spare": "cyan",
    "held off": "magenta",
    "lost": "bold red",
    "failed": "bold red",
    "silent": "bold red",
    "left": "dim",
    "idle": "dim",
    "routine": "dim",
    "good": "green",
    "note": "",
    "warn": "yellow",
    "bad": "bold red",
}
_USES: Final = {"productive": "green", "recovery": "red", "re-executed": "red", "join": "yellow"}
_ORDER: Final = ("lost", "held off", "restoring", "left", "spare", "training", "idle")
_BAR: Final = 8


class Row(NamedTuple):
    """A row of a table: its key, its cells, and the whole text that Enter shows."""

    key: str
    cells: tuple[Text, ...]
    whole: str


def title(view: RunView) -> Text:
    """Return the line above all panels."""
    text = Text.assemble(("holdfast ", "bold"), f"{printable(view.run or NONE)}   ")
    text.append(view.state.upper(), _COLOURS[view.state])
    text.append(f"   generation {view.generation}   {trainers(view)}   step ")
    text.append(step_of(view), "bold")
    if view.source == "coordinator":
        text.append("   only the present: events need a run directory", "yellow")
    else:
        text.append(f"   {span(view.step_s)} a step   {span(view.wall_s)}")
    if view.unheard and view.source == "both":
        text.append(f"   no events of {len(view.unheard)} nodes", "yellow")
    if view.message and view.state in ("done", "failed"):
        text.append(f"   {printable(view.message)}", "dim")
    return text


def protection(view: RunView) -> Text:
    """Return the newest protected step and the cost of a loss now."""
    found = view.protection
    lines = _lines(
        ("protected", f"step {number(found.step)}" if found.step is not None else "no step"),
        ("age", span(found.age_s)),
        (
            "at risk",
            NONE
            if view.ended_s
            else f"{number(found.at_risk_steps)} steps, {span(found.at_risk_s)}",
        ),
        ("to protect", f"{span(found.protect_median_s)}, at most {span(found.protect_max_s)}"),
    )
    if found.why_not:
        lines.append(f"\n{printable(found.why_not)}", "yellow")
    return lines


def time_use(view: RunView) -> Text:
    """Return the goodput, and the largest parts of the wall time as bars."""
    if not view.timed:
        return Text("not all events are read", "dim")
    lines = _lines(("goodput", share(view.goodput)), ("losses", number(view.losses)))
    whole_s = sum(view.shares.values()) or 1.0
    largest = sorted(view.shares.items(), key=lambda item: -item[1])[:4]
    for name, seconds in largest:
        part = seconds / whole_s
        lines.append(f"\n{share(part):>7} ")
        lines.append("█" * max(round(part * _BAR), 1), _USES.get(name, "bright_black"))
        lines.append(f" {name}")
    return lines


def checkpoints(view: RunView) -> Text:
    """Return the newest durable checkpoint and the one under way."""
    found = view.checkpoints
    age_s = None if found.durable_s is None else view.now_s - found.durable_s
    step = f"step {number(found.durable_step)}" if found.durable_step is not None else "none"
    newest = found.newest[0] if found.newest else None
    lines = _lines(
        ("durable", step),
        ("age", span(age_s)),
        ("written", f"{found.done:,}, {found.failed:,} failed"),
        ("newest", _checkpoint(newest)),
    )
    if found.skipped:
        lines.append(f"\n{found.skipped:,} skipped", "yellow")
    if found.in_a_row:
        lines.append(f"\n{found.in_a_row} failed in a row", "bold red")
    return lines


def memory(view: RunView) -> Text:
    """Return the host memory of snapshots over all nodes."""
    found = view.protection
    used = found.slots_bytes + found.parity_bytes + found.logs_bytes
    budget = readable(found.budget_bytes) if found.budget_bytes else "no limit"
    return _lines(
        ("snapshots", readable(found.slots_bytes)),
        ("parity", readable(found.parity_bytes)),
        ("logs", readable(found.logs_bytes)),
        ("in all", f"{readable(used)} of {budget}"),
        ("on disk", readable(found.disk_bytes)),
    )


def rollouts(view: RunView) -> Text | None:
    """Return the figures of reinforcement learning, None without any."""
    found = view.rollouts
    if found is None:
        return None
    rate = NONE if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f} tokens/s"
    lines = _lines(
        ("workers", f"{found.workers}, {found.sampling} sample, {rate}"),
        (
            "staleness",
            f"{number(found.staleness)}, of samples at most {number(found.staleness_most)}",
        ),
        ("waited", f"{span(found.waited_s)}, last {span(found.waited_last_s)}"),
        ("recovered", f"{found.recovered:,}, {found.resampled_tokens:,} tokens again"),
    )
    if found.pending is not None:
        states = (("pending", found.pending), ("running", found.running), ("ready", found.ready))
        lines.append("\nprompts    ", "dim")
        lines.append(", ".join(f"{number(count)} {name}" for name, count in states))
        lines.append(f"; the step awaits {number(found.awaited)}")
    if found.reward is not None:
        lines.append("\nreward     ", "dim")
        lines.append(f"{found.reward:.4g}")
    if found.violations or found.refused:
        lines.append(f"\n{found.violations} violations, {found.refused} refused", "bold red")
    return lines


def island(view: RunView) -> Text | None:
    """Return the part of the run in a sea, None without one."""
    found = view.island
    if found is None:
        return None
    return _lines(
        ("island", f"{printable(found.island)}, {found.state}"),
        ("tide", f"{number(found.tide)}, {found.merges:,} merges of {number(found.islands)}"),
        ("waited", f"{span(found.waited_s)}, last {span(found.waited_last_s)}"),
        ("bytes", f"{readable(found.sent_bytes)} sent, {readable(found.fetched_bytes)} fetched"),
    )


NODE_COLUMNS: Final = ("node", "state", "ranks", "step", "protected", "memory", "lost", "why")


def nodes(view: RunView) -> list[Row]:
    """Return the nodes, those in trouble first."""
    known = {state: at for at, state in enumerate(_ORDER)}
    ordered = sorted(view.nodes, key=lambda n: (not n.troubles, known.get(n.state, 0)))
    ordered = sorted(ordered, key=lambda n: known.get(n.state, 0))
    return [_node(node) for node in ordered[:MOST_ROWS]]


def _node(node: NodeView) -> Row:
    ranks = [seat.rank for seat in node.seats if seat.alive and seat.rank is not None]
    steps = [seat.step for seat in node.seats if seat.step is not None]
    straggling = [seat.straggles for seat in node.seats if seat.straggles]
    remarks = [node.why, *straggling, *node.troubles]
    remark = next((text for text in remarks if text), "")
    used = node.slots_bytes + node.parity_bytes + node.logs_bytes
    cells = (
        node.node,
        node.state,
        _ranks(ranks),
        number(max(steps, default=None)),
        number(node.protected),
        readable(used) if node.answered else NONE,
        str(node.losses) if node.losses else "",
        remark,
    )
    wrong = node.state in ("lost", "held off") or bool(node.troubles or straggling)
    colours = ("bold", _COLOURS[node.state], *[""] * 4, "red", "yellow" if wrong else "dim")
    workers = [
        f"{seat.seat}: {'pid ' + str(seat.pid) if seat.alive else 'ended'}, start {seat.attempt}"
        + (f", rank {seat.rank}" if seat.rank is not None else "")
        + (f", step {seat.step:,}" if seat.step is not None else "")
        for seat in node.seats
    ]
    whole = [f"{node.node}: {node.state}", *filter(None, remarks), "", *workers]
    return Row(node.node, _texts(cells, colours), printable("\n".join(whole), lines=True))


def _ranks(ranks: list[int]) -> str:
    """Return ranks as ``0-3`` where they follow each other, else as a list."""
    found = sorted(ranks)
    if len(found) > 2 and found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}-{found[-1]}"
    return ",".join(map(str, found[:8])) + ("…" if len(found) > 8 else "") or NONE


RECOVERY_COLUMNS: Final = ("at", "gen", "cause", "victim", "all", *(name for name, _ in PHASES))
RECOVERY_COLUMNS_NARROW: Final = ("at", "gen", "cause", "all", "victim")


def recoveries(view: RunView, *, narrow: bool = False) -> list[Row]:
    """Return the changes of the ranks with their phases, the newest first."""
    return [_recovery(each, narrow=narrow) for each in view.recoveries[:MOST_ROWS]]


def _recovery(found: RecoveryView, *, narrow: bool) -> Row:
    victims = ", ".join(found.victims) or NONE
    total = span(found.total_s) if found.over else "…"
    at, gen = clock(found.at_s) if found.dated else NONE, str(found.generation)
    colour = "yellow" if found.cause == "loss" else ""
    if narrow:
        cells: tuple[str, ...] = (at, gen, found.cause, total, victims)
        colours: tuple[str, ...] = ("dim", "", colour, "bold", "")
    else:
        phases = tuple(span(getattr(found, field)) for _, field in PHASES)
        cells = (at, gen, found.cause, victims, total, *phases)
        colours = ("dim", "", colour, "", "bold", *[""] * len(PHASES))
    return Row(str(found.generation), _texts(cells, colours), "\n".join(_of_recovery(found)))


def _of_recovery(found: RecoveryView) -> Iterator[str]:
    causes = ", ".join(found.causes) or found.cause
    yield printable(f"generation {found.generation}: {causes} {', '.join(found.victims)}")
    yield "  ".join(f"{name} {span(getattr(found, field))}" for name, field in PHASES)
    total = span(found.total_s) if found.over else "not over"
    yield f"in all {total}; {found.steps_lost} steps are repeated"
    if found.restore_step is not None:
        size = readable(found.restored_bytes)
        yield f"restored step {found.restore_step:,} from {found.tier or NONE}, {size}"
    if found.reason:
        yield ""
        yield printable(found.reason)


MESSAGE_COLUMNS: Final = ("at", "node", "message")


def messages(view: RunView) -> list[Row]:
    """Return the messages, the newest first; Enter shows the planner's reason."""
    return [_message(each) for each in view.messages[:MOST_ROWS]]


def _message(told: RunMessage) -> Row:
    cells = (clock(told.at_s), told.node, told.text + (" …" if told.reason else ""))
    whole = printable("\n\n".join(filter(None, (told.text, told.reason))), lines=True)
    key = f"{told.at_s} {told.node} {told.text}"
    return Row(key, _texts(cells, ("dim", "", _COLOURS[told.level])), whole)


def step_times(view: RunView) -> list[float]:
    """Return the mean time of a step over the course of the run, in seconds."""
    return [point.mean for point in view.step_times.points]


def _checkpoint(found: CheckpointView | None) -> str:
    if found is None:
        return NONE
    state = (
        f"{share(found.done)} written" if found.state == "writing" and found.done else found.state
    )
    return f"step {number(found.step)} {state}"


def _lines(*pairs: tuple[str, str]) -> Text:
    text = Text()
    for at, (name, value) in enumerate(pairs):
        text.append("\n" if at else "")
        text.append(f"{name:<11}", "dim")
        text.append(value)
    return text


def _texts(cells: tuple[str, ...], colours: tuple[str, ...]) -> tuple[Text, ...]:
    return tuple(
        Text(printable(cell), style=colour) for cell, colour in zip(cells, colours, strict=True)
    )
