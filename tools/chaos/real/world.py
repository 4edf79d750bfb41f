"""Run of a scenario with real processes: undisturbed first, then under strikes, then judged."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from holdfast.elastic.launch.config import EMBEDDED
from holdfast.tools.chaos.faults.environment import together
from holdfast.tools.chaos.faults.injector import Injector
from holdfast.tools.chaos.faults.registry import for_kinds
from holdfast.tools.chaos.judging.checker import HistoryVerdict, Promises, check
from holdfast.tools.chaos.judging.history import HistoryError, read
from holdfast.tools.chaos.judging.record import History
from holdfast.tools.chaos.judging.result import CALM, HISTORY, STRIKES, Result, Struck, save
from holdfast.tools.chaos.real.due import Due
from holdfast.tools.chaos.real.islands import policies, story
from holdfast.tools.chaos.real.islands.job import IslandsJob
from holdfast.tools.chaos.real.jobs import Ending, JobFolders, RealJob, words
from holdfast.tools.chaos.real.launched import HoldfastJob
from holdfast.tools.chaos.real.leaks import Leaks
from holdfast.tools.chaos.real.plain import PlainJob
from holdfast.tools.chaos.real.seen import JobProgress
from holdfast.tools.chaos.real.stacks import write_stacks
from holdfast.tools.chaos.real.striker import RealStriker
from holdfast.tools.chaos.real.targets import part_of
from holdfast.tools.chaos.scenarios.scenario import (
    MANAGED,
    JobSurroundings,
    Scenario,
    ScenarioError,
)
from holdfast.tools.chaos.scenarios.strikes import Strike, draw

_TICK_S: Final = 0.01
_LOOK_S: Final = 0.5
_WORK: Final = "work"
_CALM_WORK: Final = "calm-work"
_OF_THE_END: Final = "all steps"

Tell = Callable[[str], None]


def _silent(text: str) -> None:
    """Print nothing."""


class Calm(msgspec.Struct, frozen=True, kw_only=True):
    """The undisturbed run of a scenario's job: history, work, ending, and problems."""

    history: Path
    work: Path
    ending: Ending
    problems: tuple[str, ...] = ()


class _Play(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a job: its ending (None: it was stuck), its strikes, and its problems."""

    ending: Ending | None
    struck: tuple[Struck, ...]
    problems: tuple[str, ...]


def run(
    scenario: Scenario,
    *,
    seed: int | None = None,
    only: Collection[int] | None = None,
    folder: Path,
    source: Path | None = None,
    calm: Calm | None = None,
    tell: Tell = _silent,
) -> Result:
    """Run a scenario and return its result, which is also saved in ``folder``.

    ``source`` is the folder of the scenario's file. ``calm`` is the undisturbed run of an earlier
    call; if it is None and needed, this call makes it. Raises ``ScenarioError`` for strikes that
    are impossible on this machine.
    """
    began_s = time.monotonic()
    seed = scenario.seed if seed is None else seed
    strikes = draw(scenario, seed=seed, only=only)
    _check_parts(scenario, strikes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STRIKES).write_bytes(msgspec.json.format(msgspec.json.encode(strikes)) + b"\n")
    source = source or Path.cwd()
    if scenario.checks.undisturbed and calm is None:
        calm = undisturbed(scenario, folder=folder, source=source, tell=tell)
    elif scenario.checks.undisturbed and calm and calm.history != folder / CALM:
        shutil.copytree(calm.history, folder / CALM, dirs_exist_ok=True)
    tell(f"the job with faults, {len(strikes)} strikes drawn from seed {seed}")
    place = JobFolders.made(folder, history=HISTORY, work=_WORK)
    job = _job(scenario, place, source)
    play = _play(scenario, strikes, job, place, source=source, tell=tell)
    verdict, unread = _judge(scenario, place, calm)
    problems = [*_of_calm(calm), *_of_ending(scenario, play.ending), *play.problems, *unread]
    result = Result(
        name=scenario.name,
        world="real",
        seed=seed,
        only=None if only is None else tuple(sorted(only)),
        held=verdict.held and not problems,
        seconds=round(time.monotonic() - began_s, 3),
        verdict=verdict,
        struck=play.struck,
        problems=tuple(problems),
        replay=f"holdfast chaos run {scenario.name} --seed {seed}" + replayed_only(only),
    )
    save(folder, result)
    return result


def replayed_only(only: Collection[int] | None) -> str:
    """Return the command-line option that restricts a run to some strikes."""
    return "" if only is None else f" --only {','.join(map(str, sorted(only)))}"


def undisturbed(
    scenario: Scenario, *, folder: Path, source: Path | None = None, tell: Tell = _silent
) -> Calm:
    """Run a scenario's job without faults; its history is ``calm`` in ``folder``.

    It uses the embedded coordinator, whichever one is hit later, and the surroundings of this
    machine: the training depends on neither.
    """
    tell("the job without faults")
    place = JobFolders.made(folder, history=CALM, work=_CALM_WORK)
    workload = msgspec.structs.replace(
        scenario.workload, coordinator=EMBEDDED, surroundings=JobSurroundings(), return_s=0.0
    )
    checks = msgspec.structs.replace(scenario.checks, says=())
    alone = msgspec.structs.replace(scenario, workload=workload, checks=checks)
    source = source or Path.cwd()
    play = _play(alone, (), _job(alone, place, source), place, source=source, tell=tell)
    ending = play.ending or Ending(ok=False, message="it was stuck")
    return Calm(history=place.history, work=place.work, ending=ending, problems=play.problems)


def _job(scenario: Scenario, place: JobFolders, source: Path) -> RealJob:
    load = scenario.workload
    if load.coordinator == MANAGED:
        from holdfast.tools.chaos.real.managed import ManagedJob  # needs the extra etcd

        return ManagedJob(load, place, source=source)
    if load.runs:
        return IslandsJob(load, place, source=source)
    make = HoldfastJob if load.nodes else PlainJob
    return make(load, place, source=source)


def _check_parts(scenario: Scenario, strikes: Collection[Strike]) -> None:
    load = scenario.workload
    for strike in strikes:
        if load.coordinator == MANAGED:
            continue
        if not load.return_s and _is_launchers(strike, coordinator=load.coordinator):
            raise ScenarioError(
                f"{scenario.name}: strike {strike.number} ({strike.kind}): the "
                f"{strike.target.part} is part of the process that runs the scenario; give "
                "workload.return_s"
            )
        if part_of(strike, nodes=bool(load.nodes)) is None:
            raise ScenarioError(
                f"{scenario.name}: strike {strike.number} ({strike.kind}) needs a "
                f"{strike.target.part or 'node'}, and a job without workload.nodes has only "
                "workers; give nodes, or another target.part"
            )


def _is_launchers(strike: Strike, *, coordinator: str) -> bool:
    """Return whether a strike hits the launcher, or a coordinator that would be part of it."""
    part = strike.target.part
    killed = strike.kind in ("kill", "stop") and part == "coordinator"
    return part == "launcher" or (killed and coordinator == EMBEDDED)


# -- the run ---------------------------------------------------------------------------------------


def _play(
    scenario: Scenario,
    strikes: tuple[Strike, ...],
    job: RealJob,
    place: JobFolders,
    *,
    source: Path,
    tell: Tell,
) -> _Play:
    leaks = Leaks(job, words(scenario.workload, place, source=source), work=place.work)
    problems: list[str] = []
    with _prepared(job, strikes) as (injectors, env):
        job.start(env)
        striker = RealStriker(job, place, injectors, tell=tell)
        try:
            ending = _watch(job, Due(strikes), striker, leaks, lifetime_s=scenario.lifetime_s)
            if ending is None:
                where = write_stacks(job.workers(), place.folder)
                problems.append(
                    f"stuck: it had not ended after {scenario.lifetime_s:g} s (lifetime_s); {where}"
                )
            striker.close()
            if ending is not None and scenario.checks.leaks:
                hurt = any(not each.missed for each in striker.done)
                problems += leaks.ended(well=ending.ok, hurt=hurt)
        finally:
            striker.close()
            job.end()
    if scenario.checks.leaks:
        problems += leaks.closed()
    said = job.output() if scenario.checks.says else ""
    problems += [f"nobody said {text!r}" for text in scenario.checks.says if text not in said]
    return _Play(ending=ending, struck=tuple(striker.done), problems=tuple(problems))


@contextmanager
def _prepared(
    job: RealJob, strikes: tuple[Strike, ...]
) -> Iterator[tuple[Mapping[str, Injector], Mapping[str, str]]]:
    """Yield the injectors of strikes, by kind, and the environment that they need."""
    injectors = for_kinds({strike.kind for strike in strikes})
    families = {id(each): each for each in injectors.values()}
    with contextlib.ExitStack() as stack:
        environments = []
        for key, family in families.items():
            own = tuple(each for each in strikes if id(injectors[each.kind]) == key)
            stack.callback(family.close)
            environments.append(family.prepare(job, own))
        yield injectors, together(*environments)


def _watch(
    job: RealJob, due: Due, striker: RealStriker, leaks: Leaks, *, lifetime_s: float
) -> Ending | None:
    """Carry out due strikes until the job has ended; return None at the end of its lifetime."""
    seen, over_s, looked_s = JobProgress(), time.monotonic() + lifetime_s, 0.0
    while True:
        ending = job.ending()
        now_s = time.monotonic()
        if ending is not None or now_s > over_s:
            return ending
        seen.take(job.events())
        for strike in due.take(seen, now=time.time()):
            if striker.strike(strike, seen):
                due.struck(time.time())
        striker.undo(until_s=now_s)
        if now_s - looked_s > _LOOK_S:
            looked_s = now_s
            leaks.look()
        time.sleep(_TICK_S)


# -- the judgement ---------------------------------------------------------------------------------


def _of_calm(calm: Calm | None) -> list[str]:
    if calm is None:
        return []
    failed = [] if calm.ending.ok else [f"the undisturbed job failed: {calm.ending.message}"]
    return failed + [f"undisturbed, {problem}" for problem in calm.problems]


def _of_ending(scenario: Scenario, ending: Ending | None) -> list[str]:
    if ending is None:
        return []
    if scenario.checks.succeeds:
        return [] if ending.ok else [f"the job failed: {ending.message}"]
    if ending.ok:
        return ["the job succeeded, but the scenario expects a clear error"]
    return [] if ending.message.strip() else ["the job failed without an error message"]


def _judge(
    scenario: Scenario, place: JobFolders, calm: Calm | None
) -> tuple[HistoryVerdict, list[str]]:
    checks, problems = scenario.checks, []
    if scenario.workload.islands:
        undisturbed = (calm.history, calm.work) if calm else None
        return story.judge(place.history, place.work, calm=undisturbed, checks=checks)
    if scenario.workload.policies:
        lead = next(iter(scenario.workload.policies))
        calmly = calm.history if calm else None
        return policies.judge(place.history, lead=lead, calm=calmly, checks=checks)
    try:
        history = read(place.history)
    except HistoryError as error:
        history, problems = History(commits=()), [str(error)]
    reference: History | None = None
    with contextlib.suppress(HistoryError):  # its failure is among the problems already
        reference = read(calm.history) if calm else None
    if reference is not None and checks.state == "none":
        reference = History(commits=reference.commits, consumed=reference.consumed)
    promises = Promises(undone_most=checks.undone_most, dense=checks.dense)
    verdict = check(history, reference=reference, promises=promises)
    if not checks.succeeds:
        left = tuple(each for each in verdict.violations if each.check != _OF_THE_END)
        verdict = msgspec.structs.replace(verdict, violations=left)
    return verdict, problems
