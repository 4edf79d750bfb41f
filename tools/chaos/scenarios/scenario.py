"""A scenario: a job, the faults and their times, and the checks at the end. Pure.

It is a TOML file. Every key is a field of a structure here; an unknown key is an error. The
scenario and a seed determine all strikes: `strikes.draw`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.settings import NAME
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE, OF_ISLANDS, OF_POLICIES, Part
from holdfast.tools.chaos.scenarios.moments import RESTARTED, wrong_moment

COORDINATOR_ENV: Final = "HOLDFAST_CHAOS_COORDINATOR"
"""Environment variable with the address of the etcd that a scenario asks for.

An injector that starts its own etcd returns the variable from ``prepare``.
"""


SEA: Final = "sea"
"""The folder below a job's work in which its islands meet."""

CAST: Final = "cast"
"""The folder below a job's work in which the runs of its policies meet."""

MANAGED: Final = "managed"
"""The coordinator of a job whose launchers run its etcd."""

_LEAST_MANAGED: Final = 3
_LEAST_POLICIES: Final = 2


class ScenarioError(ConfigError):
    """A scenario cannot be read, or asks for what does not fit together."""

    code = "HF029"
    remedy = "Correct the entry of the scenario that the message names."


class JobSurroundings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Poor surroundings of a job's command; by default those of this machine.

    ``open_files`` is the limit of open files (``ulimit -n``). ``shared_memory_mib`` is the size of
    a private /dev/shm, ``temporary_kib`` that of a private place for temporary files (``TMPDIR``).
    With ``read_only`` only the run's own folder and /dev/shm can be written. With ``homeless`` the
    user has no name and no home.
    """

    open_files: int | None = None
    shared_memory_mib: int | None = None
    temporary_kib: int | None = None
    read_only: bool = False
    homeless: bool = False


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job of a scenario.

    ``command`` is its argv; in it ``{python}`` stands for the interpreter, ``{folder}`` for the
    run's own folder, ``{scenario}`` for the folder of the scenario's file. With ``nodes`` (name →
    workers per role) it is the command of one worker, which Holdfast starts on nodes of this
    machine with agents and sidecars; without ``nodes`` it is any job, started as it is.
    ``settings`` override those of a Holdfast script by group, as in ``{"snapshots": {"parity":
    2}}``. Nodes that are ``apart`` share no memory, as if each were a separate machine. With
    ``return_s`` the job's launcher and its coordinator are processes of their own, which can be
    hit; a killed launcher is started again at once. With the coordinator "managed" every node is a
    machine with a launcher of its own, and the launchers run the job's etcd. Poor ``surroundings``
    are for a command without ``nodes``; the undisturbed job has those of this machine.

    With ``islands`` (name → further words of its command) the job is as many runs, each on such
    ``nodes`` of its own, which meet in a folder of the job. The ``absent`` ones begin with a
    "join".

    With ``policies`` (name → further nodes of its run) each policy of an RL job has a run on such
    ``nodes`` of its own. The first one leads.
    """

    command: tuple[str, ...]
    nodes: dict[str, dict[str, int]] = {}
    wanted: dict[str, int] = {}
    domains: dict[str, str] = {}
    coordinator: Literal["embedded", "etcd", "managed"] = "embedded"
    env: dict[str, str] = {}
    spares: int = 0
    settings: dict[str, Any] = {}
    apart: bool = False
    return_s: float = 0.0
    surroundings: JobSurroundings = JobSurroundings()
    islands: dict[str, tuple[str, ...]] = {}
    absent: tuple[str, ...] = ()
    policies: dict[str, dict[str, dict[str, int]]] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """The names of the runs that a job of several consists of."""
        return (*self.islands, *self.policies)


class StrikeTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The victims of a fault: ``which`` of those that match the other fields.

    ``node`` is one name or several. ``count`` victims are hit at once. "leader" is the node that
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
        """The names in ``node``; none if every node is meant."""
        return (self.node,) if isinstance(self.node, str) else self.node or ()


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trigger of a fault; exactly one field is set, besides ``times`` and ``after_s``.

    ``s``: seconds after the job's first step. ``step``: this step is complete. ``state``: an event
    of this kind is seen (`holdfast.elastic.events`; ``own:NAME`` for one of the job's own).
    ``every_s``: repeatedly. ``poisson_s``: repeatedly, with random pauses of this mean.
    ``recovery``: an event of this kind after the previous fault, so that the next loss occurs
    during a recovery. ``after_s`` is an additional delay; ``times`` is the number of repetitions,
    for triggers that can repeat (0: until the job ends).
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
    """A fault: its ``kind`` (from `catalogue.CATALOGUE`), victims, trigger, duration, and amount.

    ``lasts_s`` is in seconds, or a range to draw from; 0 makes a lasting fault permanent.
    ``amount`` has the meaning and unit given in the catalogue.
    """

    kind: str
    target: StrikeTarget = StrikeTarget()
    when: When
    lasts_s: float | tuple[float, float] = 0.0
    amount: float | tuple[float, float] | None = None


class Checks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checks at the end, beyond those that always apply (`checker.CHECKS`).

    ``undisturbed``: the job also runs once without faults, and all samples and, if ``state`` is
    "bitwise", every state must be the same. ``succeeds``: the job must succeed; a scenario with a
    loss beyond the promised ones says False, and the job must then report a clear error. ``leaks``:
    nothing may be left behind. ``says`` are texts that the job's output must contain.
    """

    undisturbed: bool = True
    state: Literal["bitwise", "none"] = "bitwise"
    undone_most: int | None = None
    dense: bool = False
    succeeds: bool = True
    leaks: bool = True
    says: tuple[str, ...] = ()


class SimulatedSetup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job in the simulated world, where no command runs: the settings its program would give.

    It makes ``steps`` of about ``step_s`` seconds and ``microbatches`` each, and takes a snapshot
    of every ``snapshot_every``th step; the other fields are as in
    `holdfast.elastic.membership.records.JobSpec`.
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
    """The content of a file. After ``lifetime_s`` the job counts as stuck and is ended."""

    name: str
    about: str
    workload: Workload
    fault: tuple[FaultSpec, ...] = ()
    checks: Checks = Checks()
    simulated: SimulatedSetup = SimulatedSetup()
    seed: int = 0
    lifetime_s: float = 300.0


def parse(found: dict[str, Any], *, source: str) -> Scenario:
    """Return the scenario in a mapping; raises ``ScenarioError`` that names ``source``."""
    try:
        scenario = msgspec.convert(found, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{source}: {error}") from error
    load = scenario.workload
    if wrong := _wrong_workload(load) or _wrong_islands(load) or _wrong_policies(load):
        raise ScenarioError(f"{source}: workload.{wrong}")
    for number, fault in enumerate(scenario.fault, 1):
        if wrong := _wrong(fault) or _wrong_strike(fault, load):
            raise ScenarioError(f"{source}: fault {number} ({fault.kind}): {wrong}")
    return scenario


def _wrong_workload(load: Workload) -> str:
    if not load.command:
        return "command is empty; give the job's argv"
    if load.return_s < 0:
        return f"return_s is {load.return_s:g}; give 0 or more seconds"
    if load.return_s and not load.nodes:
        return "return_s is for nodes; give nodes, or the command the option --return-s"
    if load.return_s and load.coordinator != "embedded":
        return f"return_s is for the embedded coordinator, not {load.coordinator}; leave one out"
    if load.coordinator == MANAGED and (wrong := _wrong_machines(load)):
        return wrong
    if load.nodes and load.surroundings != JobSurroundings():
        return "surroundings are for a command without nodes, such as `holdfast run`; leave one out"
    sizes = load.surroundings
    for name in ("open_files", "shared_memory_mib", "temporary_kib"):
        found = getattr(sizes, name)
        if found is not None and found < 1:
            return f"surroundings.{name} is {found}; give 1 or more"
    return ""


def _wrong_machines(load: Workload) -> str:
    wanted = [f"node{number}" for number in range(len(load.nodes))]
    if len(wanted) < _LEAST_MANAGED:
        return f"nodes: {len(wanted)} machines have no managed etcd; give three or more"
    if [*load.nodes] != wanted:
        return f"nodes: machines of a managed etcd have numbers; name them {', '.join(wanted)}"
    if load.spares or load.domains or load.apart:
        return "spares, domains and apart are not for a managed coordinator; leave them out"
    return ""


def _wrong_islands(load: Workload) -> str:
    """Return what is wrong with the islands of a workload, "" if nothing is."""
    if unknown := sorted(set(load.absent) - load.islands.keys()):
        return f"absent: there is no island {unknown[0]}; name it in islands"
    if not load.islands:
        return ""
    if wrong := next((name for name in load.islands if not NAME.fullmatch(name)), None):
        return f"islands: {wrong!r} is no name of an island; give letters, digits, . _ -"
    if set(load.absent) >= load.islands.keys():
        return "absent has all islands; let one begin with the job"
    if not load.nodes:
        return "islands are runs of Holdfast: give nodes, which each of them has"
    return _wrong_runs(load, "islands")


def _wrong_policies(load: Workload) -> str:
    """Return what is wrong with the policies of a workload, "" if nothing is."""
    if not load.policies:
        return ""
    if load.islands:
        return "policies and islands are two kinds of jobs; leave one out"
    if len(load.policies) < _LEAST_POLICIES:
        return "policies: one policy has nobody to wait for; give two or more, or leave it out"
    if not load.nodes:
        return "policies have runs of Holdfast: give nodes, which each of them has"
    for name, more in load.policies.items():
        if twice := sorted(more.keys() & load.nodes.keys()):
            return f"policies.{name}: node {twice[0]} is among nodes already; give another name"
    return _wrong_runs(load, "runs of policies")


def _wrong_runs(load: Workload, them: str) -> str:
    """Return which setting is not for a job of several runs, "" if none is."""
    if load.coordinator != "embedded":
        return f"{them} have embedded coordinators, not {load.coordinator}; leave it out"
    if load.spares or load.wanted or load.return_s:
        return f"spares, wanted and return_s are not for {them}; leave them out"
    return ""


def _wrong_strike(fault: FaultSpec, load: Workload) -> str:
    """Return why a fault is not for a workload of one run, or of several; "" if it is."""
    target = fault.target
    part = target.part or CATALOGUE[fault.kind].parts[0]
    if part == "island" and not load.islands:
        return "there are no islands; give workload.islands"
    if part == "policy" and not load.policies:
        return "there are no policies; give workload.policies"
    if not load.runs:
        return ""
    one, them = ("island", "islands") if load.islands else ("policy", "policies")
    kinds = OF_ISLANDS if load.islands else OF_POLICIES
    if fault.kind not in kinds:
        return f"a job of {them} is not hit so; choose from {', '.join(sorted(kinds))}"
    if part in ("launcher", "coordinator", "store", "environment") or (
        part == "job" and fault.kind != "join"
    ):
        return f"target.part {part!r} is not for {them}; give {one}, node or another part"
    if target.which not in ("random", "all") or target.rank is not None:
        return f"rank, leader and slowest are of one run; name {_named(load)}"
    if target.role and load.islands:
        return f"islands have no roles; name {_named(load)}"
    return ""


def _named(load: Workload) -> str:
    """Return the words for a run, or a node of it, by its name."""
    node = f"{load.runs[-1]}/{next(iter(load.nodes))}"
    return f"an island, or a node as {node}" if load.islands else f"a policy, or a node as {node}"


def _wrong(fault: FaultSpec) -> str:
    info = CATALOGUE.get(fault.kind)
    if info is None:
        return f"unknown kind; choose from {', '.join(sorted(CATALOGUE))}"
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
        return "lasts_s: this kind has no duration; leave it out"
    if fault.amount is not None and not info.amount:
        return "amount: this kind has none; leave it out"
    return ""
