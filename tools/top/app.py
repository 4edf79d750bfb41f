"""The application for terminals: panels of one run, which a thread of its own reads."""

from __future__ import annotations

import threading
from typing import ClassVar, Final, Protocol

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static

from holdfast.tools.live.view import RunView
from holdfast.tools.top import panels
from holdfast.tools.top.panels import Row

WIDE: Final = 120
"""Columns from which the tables lie side by side."""


class Source(Protocol):
    """The run that is shown: `holdfast.tools.live.follow.Follower` is one."""

    def read(self) -> int:
        """Take over events; return how many there were."""

    def ask(self) -> None:
        """Ask the nodes."""

    def view(self) -> RunView:
        """Return the run as it is now."""


class Details(ModalScreen[None]):
    """A text over the panels; Escape, Enter and q close it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Show the text, with a way to scroll it."""
        with VerticalScroll(id="details"):
            yield Static(Text(self._text))
        yield Footer()


class TextPanel(Vertical):
    """A text with a title in its frame."""

    def __init__(self, name: str, *, id: str) -> None:
        super().__init__(id=id, classes="panel")
        self.border_title = name
        self._text = Static()

    def compose(self) -> ComposeResult:
        """Show the text."""
        yield self._text

    def show(self, text: Text | None) -> None:
        """Replace the text; without one the panel is hidden."""
        self.display = text is not None
        if text is not None:
            self._text.update(text)


class Table(DataTable[Text]):
    """A table that keeps its place while its rows are replaced."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]

    def __init__(self, name: str, columns: tuple[str, ...], *, id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False)
        self.border_title = name
        self._columns_now: tuple[str, ...] = columns
        self._rows_now: list[Row] = []

    def on_mount(self) -> None:
        """Set the columns up."""
        self.add_columns(*self._columns_now)

    def show(self, rows: list[Row], *, columns: tuple[str, ...]) -> None:
        """Replace the rows if they changed; the cursor stays on its row."""
        if rows == self._rows_now and columns == self._columns_now:
            return
        at = self._rows_now[self.cursor_row].key if self._rows_now else None
        x, y = self.scroll_offset
        follows = self.cursor_row == 0
        self.clear(columns=columns != self._columns_now)
        if columns != self._columns_now:
            self.add_columns(*columns)
        self._columns_now, self._rows_now = columns, rows
        for row in rows:
            self.add_row(*row.cells)
        place = next((i for i, row in enumerate(rows) if row.key == at), 0)
        if not follows and rows:
            self.cursor_coordinate = Coordinate(place, 0)
            self.scroll_to(x, y, animate=False)

    def whole(self, row: int) -> str:
        """Return the whole text of a row."""
        return self._rows_now[row].whole if row < len(self._rows_now) else ""


class Newer(Message):
    """A newer view of the run."""

    def __init__(self, view: RunView) -> None:
        super().__init__()
        self.view = view


class TopApp(App[None]):
    """A run as it goes. ``source`` is read in a thread, so that the keys always answer."""

    TITLE = "holdfast top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 (as textual has it)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("p", "pause", "Pause"),
        Binding("n", "look('nodes')", "Nodes"),
        Binding("r", "look('recoveries')", "Recoveries"),
        Binding("m", "look('messages')", "Messages"),
    ]
    CSS = """
    Screen { layout: vertical; }
    #title { height: 1; padding: 0 1; background: $boost; }
    #title, .panel Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #cards { height: auto; layout: grid; grid-size: 4; grid-rows: auto; }
    .panel { border: round $primary-darken-1; height: 100%; min-height: 8; padding: 0 1; }
    .panel Static { height: auto; }
    #extra { height: auto; layout: grid; grid-size: 2; grid-rows: auto; }
    #extra .panel { min-height: 6; }
    #pace { height: 4; border: round $primary-darken-1; padding: 0 1; }
    #pace Sparkline { height: 2; }
    #tables { height: 1fr; min-height: 8; layout: horizontal; }
    DataTable { border: round $primary-darken-1; height: 100%; width: 1fr; scrollbar-size: 1 1; }
    DataTable:focus { border: round $accent; }
    #messages { height: 1fr; min-height: 6; }
    #details { border: round $accent; background: $surface; padding: 1 2; width: 84%; }
    #details { height: auto; max-height: 84%; }
    #details Static { height: auto; }
    Details { align: center middle; }
    Screen.-narrow #cards { grid-size: 2; }
    Screen.-narrow .panel { min-height: 7; }
    Screen.-narrow #extra { grid-size: 1; }
    Screen.-narrow #tables { layout: vertical; height: 2fr; }
    Screen.-narrow #pace { display: none; }
    Screen.-narrow #tables DataTable { height: 1fr; }
    """

    def __init__(self, source: Source, *, every_s: float, asks_s: float) -> None:
        super().__init__()
        self._run_source, self._every_s, self._asks_s = source, every_s, asks_s
        self._paused = False
        self._over = threading.Event()
        self._view: RunView | None = None
        self._cards = {
            "protection": (TextPanel("Protection", id="protection"), panels.protection),
            "time": (TextPanel("Time", id="time"), panels.time_use),
            "checkpoints": (TextPanel("Checkpoints", id="checkpoints"), panels.checkpoints),
            "memory": (TextPanel("Memory", id="memory"), panels.memory),
        }
        self._rollouts = TextPanel("Rollouts", id="rollouts")
        self._island = TextPanel("Island", id="island")
        self._node_rows = Table("Nodes", panels.NODE_COLUMNS, id="nodes")
        self._recovery_rows = Table("Recoveries", panels.RECOVERY_COLUMNS, id="recoveries")
        self._message_rows = Table("Messages", panels.MESSAGE_COLUMNS, id="messages")
        self._pace = Sparkline([], summary_function=max)
        self._title = Static(id="title")
        self._extra = Horizontal(self._rollouts, self._island, id="extra")

    def compose(self) -> ComposeResult:
        """Lay the panels out."""
        yield self._title
        with Horizontal(id="cards"):
            for panel, _ in self._cards.values():
                yield panel
        yield self._extra
        with Vertical(id="pace"):
            yield self._pace
        with Horizontal(id="tables"):
            yield self._node_rows
            yield self._recovery_rows
        yield self._message_rows
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read the run."""
        self.query_one("#pace").border_title = "Time of a step"
        self._rollouts.show(None)
        self._island.show(None)
        self._node_rows.focus()
        for name, work in (("read", self._read), ("ask", self._ask)):
            self.run_worker(work, name=name, thread=True, exit_on_error=True)

    def on_unmount(self) -> None:
        """Let the threads end."""
        self._over.set()

    def on_resize(self) -> None:
        """Draw the tables with the columns that fit."""
        if self._view is not None:
            self._show(self._view)

    def action_pause(self) -> None:
        """Hold the picture, or let it go on."""
        self._paused = not self._paused
        if self._view is not None:
            self._show(self._view)

    def action_look(self, which: str) -> None:
        """Go to a table."""
        if not isinstance(self.screen, Details):
            self.query_one(f"#{which}").focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the whole of a row."""
        if isinstance(event.data_table, Table) and (
            text := event.data_table.whole(event.cursor_row)
        ):
            self.push_screen(Details(text))

    def _read(self) -> None:
        """Read and show until the application ends; in a thread."""
        while not self._over.is_set():
            while self._run_source.read() and not self._over.is_set():
                pass
            self.post_message(Newer(self._run_source.view()))  # safe in a thread
            self._over.wait(self._every_s)

    def _ask(self) -> None:
        while not self._over.is_set():
            self._run_source.ask()
            self._over.wait(self._asks_s)

    def on_newer(self, event: Newer) -> None:
        """Show a newer view."""
        if not self._paused:
            self._show(event.view)

    def _show(self, view: RunView) -> None:
        self._view = view
        narrow = self.size.width < WIDE
        title = panels.title(view)
        if self._paused:
            title = Text.assemble(("PAUSED ", "reverse"), title)
        self._title.update(title)
        for panel, content in self._cards.values():
            panel.show(content(view))
        self._rollouts.show(panels.rollouts(view))
        self._island.show(panels.island(view))
        self._extra.display = self._rollouts.display or self._island.display
        self._pace.data = panels.step_times(view)
        self._node_rows.show(panels.nodes(view), columns=panels.NODE_COLUMNS)
        columns = panels.RECOVERY_COLUMNS_NARROW if narrow else panels.RECOVERY_COLUMNS
        self._recovery_rows.show(panels.recoveries(view, narrow=narrow), columns=columns)
        self._message_rows.show(panels.messages(view), columns=panels.MESSAGE_COLUMNS)
