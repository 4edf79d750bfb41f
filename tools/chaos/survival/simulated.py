"""Loss of a set of nodes in a simulated job: production decisions on virtual time.

The simulator's oracle (`holdfast.elastic.testing.simulation.simulator`) also fails if a protected
step is not restored although no more nodes are gone than parity covers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Final

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.membership.records import TRAINER, JobSpec
from holdfast.elastic.testing.simulation.faults import SimulatedFault, SimulatedFaultKind
from holdfast.elastic.testing.simulation.simulator import Simulation, SimulationConfig
from holdfast.elastic.testing.simulation.training import InvariantError
from holdfast.tools.chaos.report.losses import Outcome

MOST_NODES: Final = 12

_STEPS: Final = 120
_LOST_AT_S: Final = 5.0
"""Later than the slowest start of all nodes (`SimulationConfig.startup_s`), before the end."""

_BACK_AT_S: Final = 8.0

_PAYLOAD_BYTES: Final = 1_000_000
"""Enough to fill all pieces of a node block, as a real job's state does (`ckpt.parity.stripes`)."""


def check(nodes: int, parity: int) -> None:
    """Raise ``ConfigError`` for a job that cannot be simulated."""
    if nodes > MOST_NODES:
        raise ConfigError(f"{nodes} nodes have {2**nodes - 1} sets; give {MOST_NODES} or fewer")
    if parity >= nodes:
        raise ConfigError(f"--parity {parity} of {nodes} nodes: give fewer than nodes")


def lose(nodes: Sequence[int], *, of: int, parity: int, seed: int) -> tuple[Outcome, str]:
    """Lose nodes by their numbers at once; return the outcome, and what is wrong with it, or ""."""
    at_s = _LOST_AT_S + random.Random(f"{nodes} {seed}").random()
    faults = [SimulatedFault(kind=SimulatedFaultKind.NODE, at_s=at_s, node=node) for node in nodes]
    try:
        before = _undisturbed(of, parity, seed)
        after = Simulation(_config(of, parity), seed=seed, faults=faults).run()
    except InvariantError as error:
        return "lost", str(error).splitlines()[-1].strip()
    if not after.outcome.ok:
        return "refused", "" if len(nodes) > parity else after.outcome.message
    if after.restores["nothing"] > before["nothing"]:
        why = f"went back to the checkpoint, though parity covers {parity} nodes"
        return "checkpoint", why if len(nodes) <= parity else ""
    return "parity" if after.restores["rebuilt"] > before["rebuilt"] else "memory", ""


def _config(of: int, parity: int) -> SimulationConfig:
    return SimulationConfig(
        nodes=of,
        wanted={TRAINER: of},
        slots={TRAINER: 1},
        spec=JobSpec(parity=parity),
        steps=_STEPS,
        faults=0,
        calm_s=_BACK_AT_S,
        payload_bytes=_PAYLOAD_BYTES,
    )


@functools.lru_cache(1)
def _undisturbed(of: int, parity: int, seed: int) -> dict[str, int]:
    """Return the number of restores by source in the undisturbed job."""
    return Simulation(_config(of, parity), seed=seed, faults=()).run().restores
