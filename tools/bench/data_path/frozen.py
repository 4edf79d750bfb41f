"""Section frozen: snapshots of a base that does not change and an adapter that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Final

import torch
from torch import nn

from holdfast.ckpt.snapshot.settings import CopySettings
from holdfast.tools.bench.data_path.snapshot import CALL, FENCED, MEMCPY, SnapshotTrainer
from holdfast.tools.bench.nodes import Nodes
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, timed
from holdfast.tools.bench.state import COPY_ALL, BenchState, MirrorMemory

SECTION: Final = "frozen"
ALL_COPIED: Final = ", all copied"
_MOVING: Final = 64
"""One in so many bytes is trained."""

_LAYERS: Final = 12
_NAMES: Final = (CALL, FENCED)


class FrozenState(BenchState):
    """A frozen base of linear layers beside an adapter with its optimizer."""

    def __init__(self, size_bytes: int, *, seed: int) -> None:
        super().__init__(size_bytes // _MOVING, seed=seed)
        side = int(((size_bytes - self.size_bytes) / 4 / _LAYERS) ** 0.5)
        self.base = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(_LAYERS)))
        self.base.requires_grad_(False)
        self.tracked["base"] = self.base
        self.moving_bytes = self.size_bytes
        frozen = {f"base.{name}": each for name, each in self.base.named_parameters()}
        self.tensors |= frozen
        self.size_bytes += sum(tensor.nbytes for tensor in frozen.values())

    def train(self) -> None:
        """Change all of the adapter."""
        for parameter in self.model.parameters():
            parameter.grad = torch.rand_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


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
