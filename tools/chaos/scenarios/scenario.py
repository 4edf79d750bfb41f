"""A scenario: which job is hurt, how, when, and what must hold afterwards. Pure.

It is a TOML file; every key of it is a field of a structure here, an unknown one is an error. What
really happens, and when, follows from it and a seed: `strikes.draw`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE, Part
from holdfast.tools.chaos.scenarios.moments import RESTARTED, wrong_moment


class ScenarioError(ConfigError):
    """A scenario cannot be read, or asks for what does not fit together."""

    code = "HF029"
    remedy = "Correct the entry of the scenario that the message names."


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job that is hurt.

    ``command`` is its argv; in it ``{python}`` stands for the interpreter, ``{folder}`` for a
    folder of this run's own, ``{scenario}`` for the folder of the scenario's file. With ``nodes``
    (name → workers per role) it is the command of one worker and Holdfast starts it, on nodes of
    this machine with agents and sidecars; without, it is any job, started as it is. ``settings``
    override those of a script of Holdfast by group, as in ``{"snapshots": {"parity": 2}}``.
    Nodes that are ``apart`` share no memory, as if each were a machine of its own.
    """

    command: tuple[str, ...]
    nodes: dict[str, dict[str, int]] = {}
    wanted: dict[str, int] = {}
    domains: dict[str, str] = {}
    coordinator: Literal["embedded", "etcd"] = "embedded"
    env: dict[str, str] = {}
    spares: int = 0
    settings: dict[str, Any] = {}
    apart: bool = False


class StrikeTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whom a fault hits: of all that ``part``, ``role``, ``rank`` and ``node`` leave, ``which``.

    ``node`` is a name or several. ``count`` of them are hit at once. "leader" is the node that
    leads recoveries, "slowest" the worker with the longest steps.
    """

    part: Part | None = None
    role: str | None = None
    rank: int | None = None
    node: str | tuple[str, ...] | None = None
    which: Literal["random", "leader", "slowest", "all"] = "random"
    count: int = 1

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names in ``node``; none where every node is meant."""
        return (self.node,) if isinstance(self.node, str) else self.node or ()


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sets a fault off; exactly one of the fields but ``times`` and ``after_s``.

    ``s``: seconds after the job's first step. ``step``: that step is complete. ``state``: an event
    of this kind is seen (`holdfast.elastic.events`; ``own:NAME`` for one of the job's own).
    ``every_s``: again and again. ``poisson_s``: the same with random pauses of this mean.
    ``recovery``: an event of this kind after the fault before, so that the next thing is lost
    during a recovery. ``after_s`` is waited in addition; ``times`` is how often, for those that can
    repeat (0: until the job ends).
    """

    s: float | None = None
    step: int | None = None
    state: str | None = None
    every_s: float | None = None
    poisson_s: float | None = None
    recovery: str | None = None
    after_s: float = 0.0
    times: int = 1


class FaultSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault: ``kind`` (one of `catalogue.CATALOGUE`), whom, when, for how long, how bad.

    ``lasts_s`` is seconds, or a range that is drawn from; 0 where the kind lasts: for good.
    ``amount`` has the meaning and unit that the catalogue gives.
    """

    kind: str
    target: StrikeTarget = StrikeTarget()
    when: When
    lasts_s: float | tuple[float, float] = 0.0
    amount: float | tuple[float, float] | None = None


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold at the end, beyond what is always checked (`checker.CHECKS`).

    ``undisturbed``: the job is run once without faults, and all samples and, where ``state`` is
    "bitwise", every state must be the same. ``succeeds``: the job must end well; a scenario of a
    loss beyond what was promised says False, and then a clear error must be told. ``leaks``:
    nothing may be left behind.
    """

    undisturbed: bool = True
    state: Literal["bitwise", "none"] = "bitwise"
    undone_most: int | None = None
    dense: bool = False
    succeeds: bool = True
    leaks: bool = True


class SimulatedSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job in the simulated world, where no command runs: what its program would ask for.

    ``steps`` of about ``step_s`` seconds and ``microbatches`` each, with a snapshot of every
    ``snapshot_every``th; the rest as in `holdfast.elastic.membership.records.JobSpec`.
    """

    steps: int = 200
    step_s: float = 0.1
    microbatches: int = 8
    snapshot_every: int = 1
    checkpoint_every: int = 10
    parity: int = 1
    keep: int = 2
    dp: int | None = None
    min_dp: int = 1


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a file. ``lifetime_s`` is when the job is taken for stuck and ended."""

    name: str
    about: str
    workload: Workload
    fault: tuple[FaultSpec, ...] = ()
    checks: Checks = Checks()
    simulated: SimulatedSetup = SimulatedSetup()
    seed: int = 0
    lifetime_s: float = 300.0


def parse(found: dict[str, Any], *, source: str) -> Scenario:
    """Return the scenario that a mapping is; raises ``ScenarioError``, naming ``source``."""
    try:
        scenario = msgspec.convert(found, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {error}") from error
    for number, fault in enumerate(scenario.fault, 1):
        if wrong := _wrong(fault):
            raise ScenarioError(f"{source}: fault {number} ({fault.kind}): {wrong}")
    if not scenario.workload.command:
        raise ScenarioError(f"{source}: workload.command is empty; give the job's argv")
    return scenario


def _wrong(fault: FaultSpec) -> str:
    info = CATALOGUE.get(fault.kind)
    if info is None:
        return f"no such kind; there are {', '.join(sorted(CATALOGUE))}"
    when = fault.when
    named = [
        name
        for name in ("s", "step", "state", "every_s", "poisson_s", "recovery")
        if getattr(when, name) is not None
    ]
    if len(named) != 1:
        return f"when: give one of s, step, state, every_s, poisson_s, recovery, not {len(named)}"
    if wrong := wrong_moment(when.state or when.recovery or RESTARTED):
        return f"when: {wrong}"
    if fault.target.part is not None and fault.target.part not in info.parts:
        return f"target.part {fault.target.part!r} cannot be hit; {', '.join(info.parts)} can"
    if fault.target.count < 1:
        return f"target.count is {fault.target.count}; give 1 or more"
    if fault.lasts_s and not info.lasts:
        return "lasts_s: this kind is over at once; leave it out"
    if fault.amount is not None and not info.amount:
        return "amount: this kind has none; leave it out"
    return ""
