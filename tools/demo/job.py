"""Run one job of the demo from start to end: launch it, show it, carry out its kills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from holdfast.ckpt.types import Json
from holdfast.elastic.errors import JobFailedError
from holdfast.elastic.events import Event
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import LaunchConfig
from holdfast.elastic.launch.local import Launcher
from holdfast.tools.demo.display import make_display
from holdfast.tools.demo.kills import ScheduledKills
from holdfast.tools.demo.schedule import Kill
from holdfast.tools.leftovers import leftovers
from holdfast.tools.show.live_state import LiveState

_LOG_LINES = 15


class DemoJobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a job: its events, the result that rank 0 wrote, and its leftovers."""

    events: list[Event]
    result: dict[str, Json]
    leftovers: list[str]
    killed_pids: frozenset[int]
    kills_pending: int


def run_job(
    config: LaunchConfig,
    *,
    result_file: Path,
    hold_file: Path,
    steps: int,
    title: str,
    console: Console,
    plan: Sequence[Kill] = (),
    seed: int = 0,
) -> DemoJobRecord:
    """Run a job to its end, and carry out ``plan`` on the way.

    The job begins no step while ``hold_file`` exists; rank 0 writes ``result_file`` at its end.
    Raises ``JobFailedError`` with the reason and the end of the relevant log if the job fails.
    """
    launcher = Launcher(config)
    reader, state = EventReader(launcher.run_dir), LiveState()
    launcher.start()
    nemesis = ScheduledKills(launcher, plan, seed=seed, hold_file=hold_file)
    try:
        with make_display(console, title=title, steps=steps) as display:
            outcome = None
            while outcome is None:
                outcome = launcher.wait(timeout_s=nemesis.tick_s)
                events = reader.new()
                state.apply(events)
                nemesis.tick(state)
                display.update(state, events)
    except BaseException:
        launcher.kill()
        launcher.wait()
        raise
    finally:
        nemesis.close()
    if not outcome.ok:
        raise JobFailedError(f"{title} failed: {outcome.message}. {_evidence(launcher.run_dir)}")
    return DemoJobRecord(
        events=state.history,
        result=_read_result(result_file),
        leftovers=leftovers(launcher.run),
        killed_pids=frozenset(nemesis.killed_pids),
        kills_pending=nemesis.pending,
    )


def _read_result(path: Path) -> dict[str, Json]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Json])
    except (OSError, msgspec.DecodeError) as error:
        raise JobFailedError(f"the job ended well but left no readable result: {error}") from error


def _evidence(run_dir: Path) -> str:
    """Return the directory of the logs, and the last lines of the first one with a traceback."""
    for log in sorted((run_dir / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        if any(line.startswith("Traceback") for line in lines):
            end = " | ".join(lines[-_LOG_LINES:])
            return f"Logs are in {log.parent}; the end of {log.name}: {end}"
    return f"Logs are in {run_dir / 'logs'}"
