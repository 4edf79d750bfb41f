"""One small run of a script under `holdfast run`'s launcher, with its trace."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.types import Json
from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.launch.config import LOCAL_TIMING, LaunchConfig, NodeSpec
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.loop.trace.records import (
    TRACE_ENV,
    TRACES,
    LoopEntered,
    Traced,
    TraceSettings,
)
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.check.limits import TrialLimits, is_of_time
from holdfast.tools.check.traces import RankTrace
from holdfast.tools.check.trials import Trial

_POLL_S: Final = 0.02
_LEAVE_S: Final = 20.0
_LOG_LINES: Final = 12
_decoder = msgspec.json.Decoder(Traced)
_PRELOAD: Final = ("torch",)
"""Imported once in each run instead of once in each of its processes, which takes most of the time.
Runs do not share them: each has another order of sets from its first import on."""
_TRACEBACK: Final = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The traces of a run and its end. ``message`` is empty if the run completed.

    ``crashed``: the script raised an error of its own, the end of which is ``log``. ``late``: a
    time was up, which says nothing about the script.
    """

    trial: Trial
    traces: tuple[RankTrace, ...]
    message: str = ""
    crashed: bool = False
    late: bool = False
    log: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRuns:
    """Starts the runs of one script, each in a folder of its own below ``folder``."""

    command: tuple[str, ...]
    folder: Path
    steps: int

    def run(self, trial: Trial, *, number: int, limits: TrialLimits) -> TrialResult:
        """Make a run, and if ``trial`` says so kill all of it and begin it again."""
        began_s = time.monotonic()
        folder = self.folder / f"{number:02}-{trial.name or 'reference'}"
        config = self._config(trial, folder, seed=number, hold=trial.hold, limits=limits)
        message, late = _launch(config, folder, hold=trial.hold, limits=limits)
        if trial.hold >= 0 and not message:
            config = self._config(trial, folder, seed=number, hold=-1, limits=limits)
            message, late = _launch(config, folder, hold=-1, limits=limits)
        log = "" if not message else _end_of_logs(folder)
        traces = read_traces(folder / "trace")
        return TrialResult(
            trial=trial,
            traces=tuple(traces),
            notes=() if message else tuple(_notes(trial, traces, folder / "trace")),
            message=message,
            crashed=_TRACEBACK in log,
            late=late,
            log=log,
            seconds=time.monotonic() - began_s,
        )

    def _config(
        self, trial: Trial, folder: Path, *, seed: int, hold: int, limits: TrialLimits
    ) -> LaunchConfig:
        settings = TraceSettings(
            folder=str(folder / "trace"),
            steps=self.steps,
            uneven=trial.uneven,
            deaths=trial.deaths,
            ranks=trial.ranks,
            hold=hold,
            roots=str(folder / "checkpoints"),
        )
        return LaunchConfig(
            command=self.command,
            nodes=(NodeSpec(name="node0", slots={TRAINER: trial.ranks}),),
            wanted={TRAINER: trial.ranks},
            run_dir=folder / "run",
            env={
                # so that the order of sets differs for certain, unless the user fixed it
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(seed)),
                TRACE_ENV: msgspec.json.encode(settings).decode(),
            },
            capture_output=True,
            max_attempts=len(trial.deaths) + 1,
            settings=_overrides(folder),
            timing=_timing(limits),
            preload=_PRELOAD,
        )


def _timing(limits: TrialLimits) -> AgentTiming:
    """Return time limits under which no process is taken for lost on a busy machine.

    The launcher sees the end of the agent at once, and the agent that of a worker.
    """
    silence_s = limits.silence_s
    return msgspec.structs.replace(
        LOCAL_TIMING,
        lease_ttl_s=2 * silence_s,
        self_fence_s=max(silence_s, 2 * LOCAL_TIMING.keep_alive_s),
        park_timeout_s=min(silence_s, _LEAVE_S),
        done_grace_s=max(silence_s, LOCAL_TIMING.done_grace_s),
        min_hang_s=silence_s,
        max_hang_s=max(silence_s, LOCAL_TIMING.max_hang_s),
        first_hang_s=silence_s,
        pause_s=limits.run_s,
    )


def _launch(
    config: LaunchConfig, folder: Path, *, hold: int, limits: TrialLimits
) -> tuple[str, bool]:
    """Return why the run failed, if it did, and whether a time was up."""
    trace = folder / "trace"
    trace.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "run", ignore_errors=True)
    launcher = Launcher(config)
    launcher.start()
    deadline_s = time.monotonic() + limits.run_s
    try:
        while (outcome := launcher.wait(_POLL_S)) is None:
            if hold >= 0 and (trace / "held").exists():
                _await_spilled(folder / "disk", step=hold, limit_s=limits.silence_s)
                launcher.kill()
                launcher.wait()
                return "", False
            if time.monotonic() > deadline_s:
                return f"not finished within {limits.run_s:.0f} s", True
    finally:
        launcher.kill()
        launcher.wait()
    return ("", False) if outcome.ok else (outcome.message, is_of_time(outcome.message))


def _notes(trial: Trial, traces: Sequence[RankTrace], folder: Path) -> Iterator[str]:
    """Yield what was ordered and did not come about."""
    for death in trial.deaths:
        if not (folder / f"death-{death.number}").exists():
            yield f"no rank could be killed {death.point} (step {death.step}, phase {death.phase})"
    if trial.hold >= 0 and not any(trace.entered.completed for trace in traces):
        yield "nothing was on disk to begin again from: the job began anew"


def _overrides(folder: Path) -> dict[str, Json]:
    """Return settings that keep the run's files together and every step restorable."""
    return {
        "snapshots": {"every": 1, "disk": str(folder / "disk"), "disk_every": 1},
        "checkpoint": {"on_error": "stop"},
    }


def _await_spilled(disk: Path, *, step: int, limit_s: float) -> None:
    """Wait until the snapshot of ``step`` is on disk."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        for path in disk.glob("*/*.json"):
            if f'"step":{step}' in path.read_text(errors="replace").replace(" ", ""):
                return
        time.sleep(_POLL_S)


def _end_of_logs(folder: Path) -> str:
    """Return the end of the first log that shows an error of the script."""
    found: Sequence[str] = ()
    for log in sorted((folder / "run" / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        if _TRACEBACK in text:
            tail = text[text.rindex(_TRACEBACK) :].splitlines()
            return "\n".join([tail[0], *tail[1:][-_LOG_LINES:]])
        found = found or text.splitlines()[-_LOG_LINES:]
    return "\n".join(found)


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of a run, in the order in which their ranks came to their first step.

    The last line of a process that was killed may be incomplete; it is left out.
    """
    found = []
    for path in sorted(folder.glob(TRACES)):
        data = path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        records = [_decoder.decode(line) for line in lines]
        if records and isinstance(records[0], LoopEntered):
            found.append(RankTrace(entered=records[0], records=tuple(records[1:])))
    return found
