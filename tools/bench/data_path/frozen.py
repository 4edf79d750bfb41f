"""Section frozen: snapshots of a base that does not change and an adapter that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.tools.bench.data_path.snapshot import CALL, FENCED, MEMCPY, SnapshotTrainer
from holdfast.tools.bench.kinds import FrozenState
from holdfast.tools.bench.nodes import Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, timed
from holdfast.tools.bench.state import COPY_ALL, MirrorMemory

SECTION: Final = "frozen"
ALL_COPIED: Final = ", all copied"
_NAMES: Final = (CALL, FENCED)


class AdapterTrainer:
    """A rank that trains the adapter, and its node."""

    def __init__(self, nodes: Nodes, state: FrozenState, copying: CopySettings) -> None:
        self._state, self._seat = state, SnapshotTrainer(nodes, state, copying=copying)
        self.copied_bytes = 0

    def case(self, suffix: str) -> Case:
        """Return a case that times a snapshot after a step."""

        def case() -> Mapping[str, float]:
            self._state.train()
            before = self._seat.snapshots.stats.bytes
            found = self._seat.take()
            self.copied_bytes = self._seat.snapshots.stats.bytes - before
            return {name + suffix: found[name] for name in _NAMES}

        return case

    @property
    def slot_bytes(self) -> int:
        """The shared memory of the rank's slots."""
        status: Any = self._seat.client.status()
        return int(status["bytes"]["slots"])

    def close(self) -> None:
        self._seat.close()


def frozen(setup: BenchSetup) -> list[BenchRow]:
    """Time snapshots, with the base in memory once and with everything copied every time."""
    state = FrozenState(setup.size_bytes, seed=0)
    mirror = MirrorMemory(state)
    ways = {"": CopySettings(), ALL_COPIED: COPY_ALL}
    with ExitStack() as stack:
        trainers: dict[str, AdapterTrainer] = {}
        for way, copying in ways.items():
            nodes = stack.enter_context(Nodes(setup.directory, ["a"]))
            trainers[way] = stack.enter_context(closing(AdapterTrainer(nodes, state, copying)))
        cases = [timed(MEMCPY, mirror.copy)]
        cases += [trainer.case(way) for way, trainer in trainers.items()]
        for case in cases:
            case()  # the base is copied once, and slots of the whole size go
        samples = in_turn(cases, setup)
        once, every = trainers[""], trainers[ALL_COPIED]
        extra = (
            ("bytes that move", state.moving_bytes / 1e6, "MB"),
            ("bytes copied", once.copied_bytes / 1e6, "MB"),
            ("bytes copied where all are", every.copied_bytes / 1e6, "MB"),
            ("slots", once.slot_bytes / 1e6, "MB"),
            ("slots where all are copied", every.slot_bytes / 1e6, "MB"),
        )
    size = state.size_bytes
    return [
        samples.row(SECTION, CALL, size, MEMCPY, CALL + ALL_COPIED),
        samples.row(SECTION, FENCED, size, MEMCPY, FENCED + ALL_COPIED, extra=extra),
    ]
