"""The sections of the benchmark: their modules, their needs, and about how long they take."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, cast

from rich.console import Console

from holdfast.tools.bench.samples import BenchRow, BenchSetup, Figure

Result: TypeAlias = BenchRow | Figure


class Section(NamedTuple):
    """The place of a section, and the most it needs at once, as multiples of the state's size.

    Shared memory counts as memory too. ``seconds`` are about those that it takes at the default
    size on two cores: their proportions tell the time that a run has left. The module is imported
    when the section runs.
    """

    module: str
    function: str
    seconds: float
    disk: int = 0
    shared: int = 0
    memory: int = 0

    def measure(self, setup: BenchSetup) -> list[Result]:
        """Run the section; return its figures."""
        found = getattr(importlib.import_module(self.module), self.function)
        return cast("Callable[[BenchSetup], list[Result]]", found)(setup)

    def show(self, figures: list[Figure], *, console: Console) -> None:
        """Print the figures of a section that has a table of its own."""
        importlib.import_module(self.module).show(figures, console=console)


SECTIONS: Final = {
    "snapshot": Section(
        "holdfast.tools.bench.data_path.snapshot", "snapshot", 10, disk=1, shared=3, memory=7
    ),
    "frozen": Section("holdfast.tools.bench.data_path.frozen", "frozen", 10, shared=5, memory=8),
    "buffer": Section("holdfast.tools.bench.data_path.buffer", "buffer", 15, shared=8, memory=9),
    "recover": Section(
        "holdfast.tools.bench.data_path.recovery", "recover", 20, shared=6, memory=12
    ),
    "lost": Section(
        "holdfast.tools.bench.data_path.lost_time", "lost", 600, disk=4, shared=7, memory=10
    ),
    "tuning": Section(
        "holdfast.tools.bench.data_path.tuning", "tuning", 600, disk=4, shared=12, memory=12
    ),
    "persist": Section("holdfast.tools.bench.data_path.storage", "persist", 30, disk=2, memory=4),
    "restore": Section("holdfast.tools.bench.data_path.storage", "restore", 45, disk=8, memory=5),
    "reshard": Section("holdfast.tools.bench.data_path.storage", "reshard", 30, disk=4, memory=3),
    "verify": Section("holdfast.tools.bench.data_path.storage", "verify", 5, disk=2, memory=3),
    "mttr": Section("holdfast.tools.bench.faults.mttr", "mttr", 3600, disk=4, shared=7, memory=12),
    "resize": Section("holdfast.tools.bench.faults.resize", "resize", 600, shared=7, memory=12),
    "goodput": Section("holdfast.tools.bench.faults.goodput", "goodput", 600, shared=5, memory=10),
    "join": Section("holdfast.tools.bench.faults.joining", "join", 400, shared=5, memory=12),
    "start": Section("holdfast.tools.bench.start", "start", 60),
    "rl": Section("holdfast.tools.bench.rl", "rl", 1700),
    "ledger": Section("holdfast.tools.bench.ledger.section", "ledger", 400),
    "environments": Section("holdfast.tools.bench.environments.section", "environments", 400),
    "vllm": Section("holdfast.tools.vllm.figures", "vllm", 700),
    "plan": Section("holdfast.tools.bench.plan", "plan", 60),
    "control": Section("holdfast.tools.bench.control", "control", 40),
    "watches": Section("holdfast.tools.bench.crowd.section", "watches", 180),
    "meeting": Section("holdfast.tools.bench.crowd.meeting", "meeting", 120),
    "exact": Section("holdfast.tools.bench.exact.section", "exact", 60, memory=8),
    "parity": Section("holdfast.tools.bench.data_path.codec", "parity", 10, memory=6),
    "protect": Section("holdfast.tools.bench.data_path.protect", "protect", 40, shared=6, memory=9),
    "memory": Section(
        "holdfast.tools.bench.data_path.footprint", "memory", 120, shared=18, memory=23
    ),
    "store": Section("holdfast.tools.bench.data_path.object_store", "store", 20, memory=4),
    "islands": Section("holdfast.tools.bench.islands.section", "islands", 100),
    "learning": Section("holdfast.tools.bench.islands.learning", "learning", 1500),
    "returns": Section(
        "holdfast.tools.bench.islands.returns", "returns", 150, disk=6, shared=12, memory=22
    ),
    "neighbors": Section("holdfast.tools.bench.neighbors", "neighbors", 120),
    "surface": Section("holdfast.tools.bench.surface", "surface", 260, memory=2),
    "lines": Section("holdfast.tools.bench.islands.section", "lines", 900),
}

NEED_STORE: Final = ("store", "lines")
"""Sections that are left out where ``--store`` names no place."""

OF_ENGINES: Final = {"vllm": "vllm"}
"""Engine → the section that measures it in the place of "rl"; it is left out otherwise."""
