"""Displays of a running job: a live panel on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from holdfast.elastic.events import (
    Detected,
    Event,
    FaultInjected,
    GenerationProposed,
    RolloutRecovered,
    WorkerStarted,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.elastic.membership.view import role_of
from holdfast.tools.report.timeline import KILL_NODE
from holdfast.tools.show.live_state import LiveState

_REFRESH_S = 0.2
_NEWS = 6
_LINES = 30
_BLOCKS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """A display of a job's progress."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def update(self, state: LiveState, events: list[Event]) -> None:
        """Show a newer state and the events that led to it."""


def make_display(console: Console, *, title: str, steps: int) -> Display:
    """Return the panel if the output goes to a terminal, plain lines otherwise."""
    if console.is_terminal:
        return LivePanel(console, title=title, steps=steps)
    return PlainLines(console, title=title, steps=steps)


def describe(event: Event) -> tuple[str, str] | None:
    """Return a style and a sentence for an event that is worth showing, None for all others."""
    match event:
        case FaultInjected(what=what, victim=victim, seats=seats):
            if what == KILL_NODE:
                victim = f"node {victim} (agent, sidecar, {', '.join(seats)})"
            return "bold red", f"SIGKILL of {victim}"
        case Detected(what=what, victim=victim) if what != "join":
            return "yellow", f"{victim} is gone ({what}), noticed on {event.node}"
        case GenerationProposed(reason=reason):
            return "cyan", reason
        case RolloutRecovered(worker=worker, unfinished=unfinished, tokens=tokens):
            return "green", (
                f"{unfinished} unfinished samples of {worker} go on elsewhere, "
                f"{tokens} tokens from its log"
            )
        case WorkerStarted(seat=seat, node=node, pid=pid, attempt=attempt) if attempt > 1:
            return "green", f"{seat} started again on {node}, pid {pid}"
        case _:
            return None


class PlainLines:
    """One line per event that is worth showing, and about thirty lines on the steps."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._console, self._title, self._steps = console, title, steps
        self._shown, self._pace = 0, max(1, steps // _LINES)
        self._begin_s = time.monotonic()

    def __enter__(self) -> Self:
        self._say(self._title)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def update(self, state: LiveState, events: list[Event]) -> None:
        """Write a line for each event that is worth showing, and regularly one on the steps."""
        for event in events:
            if text := describe(event):
                self._say(text[1])
        for step in range(self._shown + 1, max(state.metrics, default=0) + 1):
            self._shown = step
            if step % self._pace and step != self._steps:
                continue
            reward = state.metrics.get(step, {}).get("reward")
            words = f"reward {reward:.2f}, " if reward is not None else ""
            workers = f"trainers {state.count(TRAINER)}, rollout workers {state.count('rollout')}"
            self._say(f"step {step}/{self._steps}, {words}{workers}, generation {state.generation}")

    def _say(self, words: str) -> None:
        seconds = time.monotonic() - self._begin_s
        line = f"[{seconds:6.1f} s] {words}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LivePanel:
    """A panel that redraws itself a few times a second."""

    def __init__(self, console: Console, *, title: str, steps: int) -> None:
        self._title, self._steps = title, steps
        self._begin_s = self._drawn_s = time.monotonic()
        self._news: list[Text] = []
        self._nodes: set[str] = set()
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, state: LiveState, events: list[Event]) -> None:
        """Collect the new events, and redraw if the last drawing is old enough."""
        now_s = time.monotonic()
        for event in events:
            if text := describe(event):
                when = f"{now_s - self._begin_s:6.1f} s  "
                self._news.append(Text(when, "dim").append(text[1], text[0]))
        if now_s - self._drawn_s >= _REFRESH_S:
            self._drawn_s = now_s
            self._live.update(self._panel(state, now_s - self._begin_s), refresh=True)

    def _panel(self, state: LiveState, elapsed_s: float) -> Panel:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {state.step}/{self._steps}", "bold"),
            ProgressBar(total=self._steps, completed=state.step, width=32),
            f"generation {state.generation}",
            f"{state.step_seconds * 1000:.0f} ms/step",
        )
        found = (metrics.get("reward") for _, metrics in sorted(state.metrics.items()))
        rewards = [reward for reward in found if reward is not None]
        curve = Text("reward  ").append(sparkline(rewards[-40:]), "cyan")
        if rewards:
            curve.append(f"  {rewards[-1]:.2f}")
        news = self._news[-_NEWS:] or [Text("nothing has happened to it yet", "dim")]
        body = Group(head, curve, Text(), self._node_table(state), Text(), *news)
        return Panel(body, title=self._title, subtitle=f"{elapsed_s:.0f} s", title_align="left")

    def _node_table(self, state: LiveState) -> Table:
        table = Table.grid(padding=(0, 3))
        self._nodes |= set(state.alive)
        for node in sorted(self._nodes):
            seats = state.alive.get(node)
            row = Text(f"node {node}  ", "bold")
            if seats is None:
                row.append("✕ killed", "bold red")
            for seat in sorted(seats or ()):
                training = role_of(seat) != TRAINER or state.training.get(seat) == node
                row.append("● " if training else "○ ", "green" if training else "yellow")
                row.append(f"{seat}  ")
            table.add_row(row)
        return table


def sparkline(values: list[float]) -> str:
    """Return the values as a row of blocks of different heights."""
    if not values:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    return "".join(_BLOCKS[int((value - low) / span * (len(_BLOCKS) - 1))] for value in values)
