"""`holdfast demo --engine vllm`: a server is killed in the middle of its answers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
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
from holdfast.tools.vllm.loop import GROUP, GROUPS
from holdfast.tools.vllm.program import vllm_program

QUICK_STEPS: Final = 6
STEPS: Final = 12
LEAST_STEPS: Final = 4

_TICK_S: Final = 0.1
_ENGINE: Final = "vllm"


class EngineDemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report: the outcome of each check, why some failed, and both jobs' results."""

    verdict: dict[str, bool]
    failures: list[str]
    hurt: dict[str, Json]
    undisturbed: dict[str, Json]


class ServerKill:
    """Kills one server of a job, once both are there and it is in the middle of its work."""

    def __init__(self, *, step: int, latest: int) -> None:
        self._step, self._latest = step, latest
        self._groups: dict[str, int] = {}
        self._done = 0
        self.killed = ""
        self.restarted = False

    def see(self, event: Event) -> None:
        """Learn from an event, and kill if it is time."""
        match event:
            case StepDone(step=step):
                self._done = max(self._done, step)
            case UserEvent(name=name, fields=fields) if name == READY:
                self._groups[event.seat] = int(fields["group"])
                self.restarted = self.restarted or event.seat == self.killed
        is_due = self._done >= (self._step if len(self._groups) > 1 else self._latest)
        if not self.killed and self._groups and is_due:
            self._kill(sorted(self._groups)[0])

    def _kill(self, seat: str) -> None:
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
    kill = ServerKill(step=1 + seed % (steps // 2), latest=steps // 2)
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
        if wrong := result["ledger"]["violations"]:
            found["ledger_ok"] = f"{name}: {wrong}"
        elif len(result["reward"]) != steps:
            found["ledger_ok"] = f"{name}: {len(result['reward'])} of {steps} steps"
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
    tokens = sum(int(each) for each in report.hurt["tokens"])
    console.print(
        f"  {report.hurt['moved']} answers moved; {len(report.hurt['tokens'])} steps of "
        f"{GROUPS * GROUP} answers trained {tokens} tokens, each sampled once"
    )
    rewards = report.hurt["reward"]
    console.print(f"  reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
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
                    kill.see(event)
    except BaseException:
        launcher.kill()
        launcher.wait()
        raise
    if not outcome.ok:
        raise JobFailedError(
            f"the job {name} failed: {outcome.message}; its logs are in {runs / name / 'logs'}"
        )
    return msgspec.json.decode(result.read_bytes(), type=dict[str, Json]), leftovers(launcher.run)
