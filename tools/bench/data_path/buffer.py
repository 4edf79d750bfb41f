"""Section buffer: snapshots of a replay buffer of which a few rows change at each step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Final

from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.tools.bench.data_path.snapshot import CALL, FENCED, MEMCPY, SnapshotTrainer
from holdfast.tools.bench.kinds import BufferState
from holdfast.tools.bench.nodes import Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, timed
from holdfast.tools.bench.state import COPY_ALL, MirrorMemory

SECTION: Final = "buffer"
NAMED: Final = ", rows named"
ALL_COPIED: Final = ", all copied"
_LEARNING: Final = 6
"""Snapshots until the buffer is known to move in part and every slot was compared once."""

_NAMES: Final = (CALL, FENCED)


class BufferTrainer:
    """A rank that trains the model and fills the buffer, and its node.

    If it ``names`` rows, it names all that were written since its snapshot before.
    """

    def __init__(
        self, nodes: Nodes, state: BufferState, copying: CopySettings, *, names: bool
    ) -> None:
        self._state, self._names, self._named = state, names, 0
        self._seat = SnapshotTrainer(nodes, state, copying=copying)
        self.copied_bytes = 0

    def case(self, suffix: str) -> Case:
        """Return a case that times a snapshot after a step."""

        def case() -> Mapping[str, float]:
            taking, state = self._seat.snapshots, self._state
            state.train()
            if self._names:
                taking.touched(state.buffer, slice(self._named, state.written))
            self._named = state.written
            before = taking.stats.bytes
            found = self._seat.take()
            self.copied_bytes = taking.stats.bytes - before
            return {name + suffix: found[name] for name in _NAMES}

        return case

    def close(self) -> None:
        self._seat.close()


def buffer(setup: BenchSetup) -> list[BenchRow]:
    """Time snapshots: rows found by reading, rows named, and everything copied every time."""
    state = BufferState(setup.size_bytes, seed=0)
    mirror = MirrorMemory(state)
    ways = {
        "": (CopySettings(), False),
        NAMED: (CopySettings(), True),
        ALL_COPIED: (COPY_ALL, False),
    }
    with ExitStack() as stack:
        trainers: dict[str, BufferTrainer] = {}
        for way, (copying, names) in ways.items():
            nodes = stack.enter_context(Nodes(setup.directory, ["a"]))
            made = BufferTrainer(nodes, state, copying, names=names)
            trainers[way] = stack.enter_context(closing(made))
        cases = [timed(MEMCPY, mirror.copy)]
        cases += [trainer.case(way) for way, trainer in trainers.items()]
        for _ in range(_LEARNING):
            for case in cases:
                case()
        samples = in_turn(cases, setup)
        extra = (
            ("bytes that move", state.moving_bytes / 1e6, "MB"),
            *(
                (f"bytes copied{way}", each.copied_bytes / 1e6, "MB")
                for way, each in trainers.items()
            ),
        )
    size = state.size_bytes
    return [
        samples.row(SECTION, CALL, size, MEMCPY, CALL + ALL_COPIED),
        samples.row(SECTION, FENCED, size, MEMCPY, FENCED + ALL_COPIED),
        samples.row(SECTION, CALL + NAMED, size, MEMCPY, CALL + ALL_COPIED),
        samples.row(SECTION, FENCED + NAMED, size, MEMCPY, FENCED + ALL_COPIED, extra=extra),
    ]
