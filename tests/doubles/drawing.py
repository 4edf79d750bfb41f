"""Small random jobs drawn from a seed, of different kinds, so that schedules reach many cases.

Varying the configuration together with the schedule finds more faults than as many runs of one
configuration (Groce et al., "Swarm Testing", ISSTA 2012).
"""

from __future__ import annotations

from random import Random

from holdfast.elastic.membership.records import JobSpec
from holdfast.elastic.testing.simulation.simulator import SimulationConfig


def draw_config(seed: int) -> SimulationConfig:
    """Return the job of this seed: two to four nodes, about thirty steps, one to four bursts."""
    random = Random(f"job of {seed}")
    nodes = random.choice((2, 3, 3, 4))
    trainers = random.choice((nodes, nodes, nodes + 1, max(nodes - 1, 1)))
    return SimulationConfig(
        nodes=nodes,
        wanted={"trainer": trainers},
        slots={"trainer": random.choice((1, 2, 2))},
        spec=_draw_spec(random, trainers=trainers),
        steps=random.choice((20, 30, 40)),
        snapshot_every=random.choice((1, 2, 3)),
        startup_s=random.choice(((0.05, 0.3), (0.2, 1.0))),
        notice_s=random.choice(((0.0, 0.005), (0.0, 0.015), (0.0, 0.05))),
        domains=random.choice((0, 0, 2)),
        faults=random.choice((1, 2, 2, 3, 4)),
        calm_s=2.5,
        expect_nodes=random.choice((0, nodes)),
    )


def _draw_spec(random: Random, *, trainers: int) -> JobSpec:
    parity, keep = random.choice((0, 1, 1, 1, 2)), random.choice((1, 2))
    least = max(trainers - 1, 1)
    return random.choice(
        (
            JobSpec(parity=parity, keep=keep),
            JobSpec(parity=parity, keep=keep, min_dp=least),
            JobSpec(parity=parity, keep=keep, dp=least),
            JobSpec(parity=parity, keep=keep, columns=1 if parity else 0),
        )
    )
