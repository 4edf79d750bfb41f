"""`holdfast demo --engine vllm`: a server is killed in the middle of its answers."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from holdfast.adapters.rl.config import ROLE
from holdfast.adapters.rl.engines.keeping import READY
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError, JobFailedError
from holdfast.elastic.events import Event, StepDone, UserEvent
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.membership.records import TRAINER
from holdfast.tools.leftovers import leftovers
from holdfast.tools.show.levels import Importance
from holdfast.tools.show.telling import StoryTeller
from holdfast.tools.vllm.llama import save_llama
from holdfast.tools.vllm.loop import GROUPS
from holdfast.tools.vllm.program import vllm_program

QUICK_STEPS: Final = 6
STEPS: Final = 12
LEAST_STEPS: Final = 4

_TICK_S: Final = 0.1
_MIDDLE: Final = 0.5
_ENGINE: Final = "vllm"


class EngineDemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report: the outcome of each check, why some failed, and both jobs' results."""

    verdict: dict[str, bool]
    failures: list[str]
    hurt: dict[str, Json]
    undisturbed: dict[str, Json]


class ServerKill:
    """Kills one server of a job once both are there, in the middle of a step.

    It waits for ``step``, and for the second server until ``latest``. The caller supplies the time.
    """

    def __init__(self, *, step: int, latest: int) -> None:
        self._step, self._latest = step, latest
        self._groups: dict[str, int] = {}
        self._done, self._due_s = 0, math.inf
        self.killed = ""
        self.restarted = False

    def see(self, event: Event, *, now_s: float) -> None:
        """Learn from an event; after a step it is time in the middle of the next one."""
        match event:
            case StepDone(step=step, seconds=seconds):
                self._done = max(self._done, step)
                self._due_s = now_s + _MIDDLE * (seconds or 0.0)
            case UserEvent(name=name, fields=fields) if name == READY:
                self._groups[event.seat] = int(fields["group"])
                self.restarted = self.restarted or event.seat == self.killed

    def tick(self, *, now_s: float) -> None:
        """Kill if it is time."""
        wanted = self._step if len(self._groups) > 1 else self._latest
        if self.killed or not self._groups or self._done < wanted or now_s < self._due_s:
            return
        seat = min(self._groups)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._groups[seat], signal.SIGKILL)
            self.killed = seat


def run(*, steps: int, seed: int, folder: Path, keep: bool, console: Console) -> int:
    """Run both jobs in ``folder`` and write its report; return 0 only if every check held.

    Raises ``ConfigError`` if there is no vLLM, or there are too few steps.
    """
    vllm_program()
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps {steps} is too few with an engine: give {LEAST_STEPS} or more")
    runs = (folder / "runs").absolute()
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    save_llama(runs)
    console.print("two vLLM servers start, which takes half a minute or more")
    kill = ServerKill(step=2 + seed % (steps // 2 - 1), latest=steps // 2)
    hurt, left = _job(runs, "hurt", steps=steps, engine=_ENGINE, kill=kill, console=console)
    console.print("the same job undisturbed, with the included engine")
    calm, also = _job(runs, "undisturbed", steps=steps, engine="built-in", console=console)
    failures = judge(hurt, calm, killed=kill.killed, steps=steps, left=left + also)
    report = EngineDemoReport(
        verdict={name: not why for name, why in failures.items()},
        failures=[why for why in failures.values() if why],
        hurt=hurt,
        undisturbed=calm,
    )
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2)
    (folder / "report.json").write_bytes(encoded + b"\n")
    _conclude(report, kill, folder, console)
    if not report.failures and not keep:
        shutil.rmtree(runs)
    return 1 if report.failures else 0


def judge(
    hurt: dict[str, Json], calm: dict[str, Json], *, killed: str, steps: int, left: list[str]
) -> dict[str, str]:
    """Return why each check failed, "" for those that held."""
    found = dict.fromkeys(("exact", "ledger_ok", "moved", "cleanup_ok"), "")
    if hurt["final_hash"] != calm["final_hash"]:
        found["exact"] = (
            f"the final weights are {hurt['final_hash']}, undisturbed {calm['final_hash']}: a "
            "token differs, by an error or by rounding"
        )
    for name, result in (("hurt", hurt), ("undisturbed", calm)):
        ledger = result["ledger"]
        trained = {state: count for state, count in ledger["ordinals"].items() if count}
        if ledger["violations"] or ledger["tokens_resampled"]:
            found["ledger_ok"] = f"{name}: {ledger}"
        elif (result["steps"], trained) != (steps, {"trained": steps * GROUPS}):
            found["ledger_ok"] = f"{name}: {result['steps']} of {steps} steps, prompts {trained}"
    if not killed or not hurt["moved"]:
        found["moved"] = "no server was killed in the middle of an answer"
    found["cleanup_ok"] = "; ".join(left)
    return found


_CHECKS: Final = {
    "exact": "the weights are bit for bit those of the undisturbed run",
    "ledger_ok": "every prompt was trained once, every token has its version",
    "moved": "the answers of the killed server went on elsewhere after their last tokens",
    "cleanup_ok": "no process and no memory was left behind",
}


def _conclude(report: EngineDemoReport, kill: ServerKill, folder: Path, console: Console) -> None:
    console.print()
    for name, passed in report.verdict.items():
        sign, style = ("✓", "green") if passed else ("✕", "bold red")
        console.print(f"  {sign} {_CHECKS[name]}", style=style)
    for failure in report.failures:
        console.print(f"    {failure}", style="red", markup=False)
    console.print()
    back = "and came back" if kill.restarted else "and the job was over before it was back"
    console.print(f"  the server of {kill.killed} was killed, {back}", markup=False)
    ledger = report.hurt["ledger"]
    console.print(
        f"  {report.hurt['moved']} answers moved; {ledger['ordinals']['trained']} prompts and "
        f"{ledger['samples_accepted']} answers trained, {ledger['tokens_sampled']} tokens sampled, "
        f"{ledger['tokens_resampled']} again"
    )
    console.print(f"  report: {folder / 'report.json'}", markup=False)


def _job(
    runs: Path,
    name: str,
    *,
    steps: int,
    engine: str,
    console: Console,
    kill: ServerKill | None = None,
) -> tuple[dict[str, Json], list[str]]:
    """Run a job; return its result, and what it left behind."""
    result, servers = runs / f"{name}.json", engine == _ENGINE
    wanted = {TRAINER: 1, **({ROLE: 2} if servers else {})}
    first, second = ({TRAINER: 1, **({ROLE: 1} if servers else {})}, {ROLE: 1})
    names = ("--folder", str(runs), "--engine", engine, "--steps", str(steps))
    nodes = [NodeSpec(name="a", domain="a", slots=first)]
    launcher = Launcher(
        LaunchConfig(
            command=(
                *(sys.executable, "-m", "holdfast.tools.vllm.loop", *names),
                *("--result", str(result)),
            ),
            nodes=(*nodes, NodeSpec(name="b", domain="b", slots=second)) if servers else (*nodes,),
            wanted=wanted,
            run_dir=runs / name,
            capture_output=True,
        )
    )
    teller = StoryTeller(form="text", least=Importance.INFO)
    reader = EventReader(launcher.run_dir)
    launcher.start()
    try:
        outcome = None
        while outcome is None:
            outcome = launcher.wait(timeout_s=_TICK_S)
            for event in reader.new():
                for line in teller.lines(event):
                    console.print(line, markup=False, highlight=False)
                if kill is not None:
                    kill.see(event, now_s=time.monotonic())
            if kill is not None:
                kill.tick(now_s=time.monotonic())
    except BaseException:
        launcher.kill()
        launcher.wait()
        raise
    if not outcome.ok:
        raise JobFailedError(
            f"the job {name} failed: {outcome.message}; its logs are in {runs / name / 'logs'}"
        )
    return msgspec.json.decode(result.read_bytes(), type=dict[str, Json]), leftovers(launcher.run)
