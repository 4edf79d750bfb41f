"""Translation of a scenario into the simulated world, as far as the world supports it."""

from __future__ import annotations

from typing import Final

from holdfast.elastic.events import (
    FencingBegun,
    FencingDone,
    GenerationProposed,
    RankReformed,
    SidecarStarted,
    StateRestored,
    StepDone,
    StepProtected,
    TrainingResumed,
)
from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.testing.simulation.faults import SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import SimulationConfig
from holdfast.tools.chaos.scenarios.catalogue import CATALOGUE, Part
from holdfast.tools.chaos.scenarios.scenario import FaultSpec, Scenario, ScenarioError

REAL: Final = "or run it with real processes (--world real)"

KINDS: Final[dict[tuple[str, Part], SimulatedFaultKind]] = {
    ("kill", "worker"): SimulatedFaultKind.WORKER,
    ("kill", "sidecar"): SimulatedFaultKind.SIDECAR,
    ("kill", "agent"): SimulatedFaultKind.NODE,
    ("kill", "node"): SimulatedFaultKind.NODE,
    ("lose", "node"): SimulatedFaultKind.NODE,
    ("stop", "worker"): SimulatedFaultKind.HANG,
    ("stop", "agent"): SimulatedFaultKind.PAUSE,
    ("stop", "coordinator"): SimulatedFaultKind.OUTAGE,
    ("hang", "worker"): SimulatedFaultKind.HANG,
    ("crash", "node"): SimulatedFaultKind.CRASH,
    ("partition", "node"): SimulatedFaultKind.CUT,
    ("partition-in", "node"): SimulatedFaultKind.DEAF,
    ("partition-out", "node"): SimulatedFaultKind.MUTE,
    ("partition-pair", "node"): SimulatedFaultKind.APART,
    ("coordinator-restart", "coordinator"): SimulatedFaultKind.OUTAGE,
    ("split", "node"): SimulatedFaultKind.SPLIT,
    ("weather", "job"): SimulatedFaultKind.WEATHER,
    ("outage", "coordinator"): SimulatedFaultKind.OUTAGE,
}
"""Kind and part → the simulator's fault.

Its nodes live and die as a whole, including their memory. A killed agent therefore takes its node
with it, which returns empty.
"""

EVENTS: Final = tuple(
    kind.tag()
    for kind in (
        FencingBegun,
        FencingDone,
        GenerationProposed,
        RankReformed,
        SidecarStarted,
        StateRestored,
        StepDone,
        StepProtected,
        TrainingResumed,
    )
)
"""Kinds of events that the simulation reports."""

_SPREAD: Final = 0.3
"""Relative spread of the duration of steps."""


def part_of(kind: str, part: Part | None) -> Part:
    """Return the part that a fault hits."""
    return part or CATALOGUE[kind].parts[0]


def names_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the nodes' names; the simulator calls them n0, n1 and so on, in this order."""
    return tuple(scenario.workload.nodes)


def config_of(scenario: Scenario) -> SimulationConfig:
    """Return the simulated job. Raises ``ScenarioError`` for an entry that cannot be simulated."""
    _check(scenario)
    workload, settings = scenario.workload, scenario.simulated
    slots = {f"n{at}": dict(each) for at, each in enumerate(workload.nodes.values())}
    roles = {role for each in slots.values() for role in each}
    room = {role: sum(each.get(role, 0) for each in slots.values()) for role in sorted(roles)}
    domains = {
        f"n{at}": workload.domains[name]
        for at, name in enumerate(workload.nodes)
        if name in workload.domains
    }
    return SimulationConfig(
        nodes=len(slots),
        wanted=dict(workload.wanted) or room,
        slots_of=slots,
        domains_of=domains,
        spec=JobSpec(
            parity=settings.parity, keep=settings.keep, dp=settings.dp, min_dp=settings.min_dp
        ),
        steps=settings.steps,
        snapshot_every=settings.snapshot_every,
        checkpoint_every=settings.checkpoint_every,
        step_s=(settings.step_s * (1 - _SPREAD), settings.step_s * (1 + _SPREAD)),
        faults=0,
        calm_s=scenario.lifetime_s,
        patience_s=0.0,
        expect_nodes=len(slots),
    )


def _check(scenario: Scenario) -> None:
    if not scenario.workload.nodes:
        raise ScenarioError(
            f"{scenario.name}: workload.nodes is missing, and only jobs of Holdfast can be "
            f"simulated: name the nodes, {REAL}"
        )
    for number, fault in enumerate(scenario.fault, 1):
        if wrong := _wrong(fault):
            raise ScenarioError(f"{scenario.name}: fault {number} ({fault.kind}): {wrong}, {REAL}")


def _wrong(fault: FaultSpec) -> str:
    """Return why a fault cannot be simulated, with the alternatives; "" if it can."""
    parts = [part for kind, part in KINDS if kind == fault.kind]
    if not parts:
        kinds = ", ".join(sorted({kind for kind, _ in KINDS}))
        return f"it is not simulated; give one of {kinds}"
    part = part_of(fault.kind, fault.target.part)
    if part not in parts:
        return f"of a part {part!r} it is not simulated; give target.part = {' or '.join(parts)}"
    if fault.target.which == "slowest":
        return "no rank of a simulation is the slowest; give another target.which"
    for moment in (fault.when.state, fault.when.recovery):
        if moment is not None and moment not in EVENTS:
            return f"no event {moment!r} is simulated; give one of {', '.join(EVENTS)}"
    return ""
