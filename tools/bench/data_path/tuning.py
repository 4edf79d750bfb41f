"""Section tuning: the cost of a snapshot after every step, by how much of the state changes.

Real training processes on two and on eight nodes of this machine, with parity: an adapter on a
frozen base, a replay buffer, and a state of which everything changes. Beside them are the same with
everything copied at each step, DCP's asynchronous saves, and no saving.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from holdfast.tools.bench.data_path import trainee
from holdfast.tools.bench.data_path.lost_time import TraineeCrew
from holdfast.tools.bench.kinds import KINDS
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Timings

SECTION: Final = "tuning"
WAYS: Final = (trainee.PARITY, trainee.EVERY, trainee.DCP_THREAD)
_STEP_COPIES: Final = 4.0
_LEARNING: Final = 12
"""Steps until it is known what moves, and every slot was compared once."""

_STEPS: Final = 8


def tuning(setup: BenchSetup) -> list[BenchRow]:
    """Time training with a save after every step, on 2 and 8 nodes (``quick``: 2)."""
    rows: list[BenchRow] = []
    for nodes in (2,) if setup.quick else (2, 8):
        for kind in KINDS:
            with TraineeCrew.start(setup, nodes, WAYS, kind=kind) as crew:
                rows += _measure(setup, crew, f"{kind}, {nodes} nodes")
    return rows


def _measure(setup: BenchSetup, crew: TraineeCrew, name: str) -> list[BenchRow]:
    products, samples, waits = crew.pace.products(_STEP_COPIES), Timings(), Timings()
    for way in (trainee.PARITY, trainee.EVERY):
        crew.train(way, steps=_LEARNING, products=0, every=1)
    for _ in range(setup.repeat):
        free = crew.train(trainee.NOTHING, steps=_STEPS, products=products)
        samples.add({trainee.NOTHING: free.step_s})
        for way in WAYS:
            found = crew.train(way, steps=_STEPS, products=products, every=1)
            samples.add({way: found.step_s})
            waits.add({way: found.stall_s / found.steps})
        setup.lap()
    free_s = samples.yardstick(trainee.NOTHING).seconds
    rows = []
    for way in WAYS:
        longer = samples.yardstick(way).seconds / free_s - 1
        extra = [
            ("a step is longer by", longer * 100, "%"),
            ("of it training waits", waits.yardstick(way).seconds * 1e3, "ms"),
        ]
        if way != trainee.DCP_THREAD:
            extra.append(("shared memory of all nodes", crew.shared_bytes(way) / 1e6, "MB"))
        versus = (trainee.NOTHING, *(each for each in WAYS if way == trainee.PARITY != each))
        row = samples.row(SECTION, way, 0, *versus, extra=extra)
        rows.append(replace(row, name=f"{name}: {way}"))
    return rows
