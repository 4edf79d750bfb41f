"""A job's status as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.tools.show.node_status import MEMORY, STAGES, NodeStatus
from holdfast.tools.terminal import readable

_NONE = "–"


def view(nodes: Sequence[NodeStatus]) -> RenderableType:
    """Return the summary, the tables, and one line per problem."""
    answering = [node for node in nodes if node.status]
    parts: list[RenderableType] = [Text(summary(nodes), style="bold"), _nodes(nodes)]
    if any(node.meter(stage) for node in answering for stage in STAGES):
        parts.append(_stages(answering))
    parts.append(_memory(answering))
    parts += [
        Text.assemble((f"{node.node}: ", "bold"), (trouble, "yellow"))
        for node in nodes
        for trouble in (
            *([f"held off: {node.held_off}"] if node.held_off else ()),
            *node.troubles(),
        )
    ]
    return Group(*parts)


def summary(nodes: Sequence[NodeStatus]) -> str:
    """Return one line that names the step the job could restore now."""
    run = next((node.status["run"] for node in nodes if node.status), "?")
    count = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    newest = max(nodes, key=lambda node: (node.generation, node.step("protected") or -1))
    head = f"job {run}: {count}, generation {newest.generation}"
    if (step := newest.step("protected")) is None:
        step = newest.step("held")
        return f"{head}; no snapshot is protected yet" + (
            "" if step is None else f", step {step} of an earlier generation is available"
        )
    age = f", {seconds(newest.age_s)} old" if newest.age_s is not None else ""
    return f"{head}; newest restore point step {step}{age}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that fits it."""
    if value is None:
        return _NONE
    if value < 0.0995:
        return f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 99.5 else f"{value / 60:.0f} min"


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def _step(step: int | None) -> str:
    return _NONE if step is None else str(step)


def _nodes(nodes: Sequence[NodeStatus]) -> Table:
    table = _table(
        "node", "generation", "committed", "protected", "durable", "age", "to protect", "at most"
    )
    for node in nodes:
        if not node.status:
            table.add_row(node.node, *[_NONE] * 7, style="red")
            continue
        protect = node.meter("protect") or {}
        table.add_row(
            node.node,
            str(node.generation),
            *(_step(node.step(what)) for what in ("committed", "protected", "durable")),
            seconds(node.age_s),
            seconds(protect.get("median_s")),
            seconds(protect.get("max_s")),
        )
    return table


def _stages(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("stage", "node", "count", "median", "at most", "bytes", "bytes/s", left=2)
    for stage in STAGES:
        name = stage
        for node in nodes:
            if (meter := node.meter(stage)) is None:
                continue
            rate = meter["bytes"] / meter["seconds"] if meter["seconds"] else 0
            table.add_row(
                name,
                node.node,
                f"{meter['count']:,}",
                seconds(meter["median_s"]),
                seconds(meter["max_s"]),
                readable(meter["bytes"]),
                f"{readable(rate)}/s",
            )
            name = ""
    return table


def _memory(nodes: Sequence[NodeStatus]) -> Table:
    table = _table("memory", *MEMORY, "needs", "budget", "mode", "on disk")
    for node in nodes:
        needs, budget = int(node.memory.get("need_bytes", 0)), node.nbytes("budget")
        table.add_row(
            node.node,
            *(readable(node.nbytes(purpose)) for purpose in MEMORY),
            readable(needs) if needs else _NONE,
            readable(budget) if budget else "none",
            str(node.memory.get("mode", _NONE)),
            readable(node.nbytes("disk")),
        )
    return table
