"""A watch over tracked state during a pass: what a microbatch changes there follows the ranks.

Every rank runs other microbatches. A running average, a counter, a schedule or a generator that
each of them moves on ends elsewhere at every number of ranks, and with equal shares no comparison
of ranks can tell. So a pass must leave tracked state as it found it. Buffers are not looked at:
they follow rules of their own.

Plain values are compared in every pass. Tensors are compared by digest: all of them in the first
passes of a run, a sample of them now and then. A write that is taken back is no change. With
``exact`` the ``state_dict()`` of other tracked objects is compared in those passes, too.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from holdfast.ckpt.state.kinds.model_parts import ModelParts
from holdfast.ckpt.state.trees.per_rank import PerRank
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.contents import BLOCK_BYTES, digest, is_due, samples_of
from holdfast.elastic.groups.shards import local_of
from holdfast.elastic.tracked.entries import leaves_of
from holdfast.elastic.tracked.generators import GENERATORS, state_of

Parameters = list[tuple[str, torch.nn.Parameter]]

_MOST_ENTRIES: Final = 1024
"""Entries of tracked dicts and lists that are looked at; those of a long history are not."""

_ARRAY_BYTES: Final = 1 << 16
"""Largest NumPy array that is compared as a plain value."""

_WHOLE_PASSES: Final = 2
"""Passes of each phase in which all of the objects' tensors are compared, from the first on."""

_OTHERWISE: Final = (
    torch.nn.Module, Optimizer, LRScheduler, DataLoader, ModelParts, PerRank, torch.Generator,
)  # fmt: skip
"""Kinds of objects that follow rules of their own, whether they have ``state_dict`` or not."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class _TensorBefore:
    """A tensor as it was when the pass began."""

    tensor: torch.Tensor
    blocks: range
    digest: int

    def has_changed(self) -> bool:
        return digest(local_of(self.tensor), self.blocks) != self.digest


class SteadyState:
    """The tracked state over one pass at a time.

    ``parameters`` returns those of the tracked modules by name; if FSDP2 ``moves`` them in a pass,
    only its shards are compared. ``objects``: those with ``state_dict`` are compared as well, but
    not the entries ``of_leader``, which other threads may change at any time.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        parameters: Callable[[], Parameters],
        *,
        moves: bool,
        objects: bool,
        of_leader: Collection[str] = (),
    ) -> None:
        self._state, self._parameters, self._moves = state, parameters, moves
        self._has_objects, self._of_leader = objects, of_leader
        self._turn: int | None = None
        self._objects: dict[str, dict[str, object]] = {}
        self._passes: dict[int, int] = {}
        self._values: dict[str, object] = {}
        self._tensors: dict[str, _TensorBefore] = {}

    def begin_pass(self, *, step: int, phase: int) -> None:
        """Note the state before a pass."""
        count = self._passes.get(phase, 0)
        self._passes[phase] = count + 1
        self._values = self._read()
        self._tensors = {}
        self._turn = count if is_due(count) else None
        self._objects = self._read_objects()
        if is_due(count):
            tensors = dict(self._found())
            sizes = [local_of(tensor).nbytes for tensor in tensors.values()]
            parts = max(1, samples_of(sum(sizes), len(sizes))) if step or count else 1
            for name, tensor in tensors.items():
                self._see(name, tensor, turn=count, parts=parts)

    def _see(self, name: str, tensor: torch.Tensor, *, turn: int, parts: int) -> None:
        local = local_of(tensor)
        first = (turn + zlib.crc32(name.encode())) % parts
        if blocks := range(first, -(-local.nbytes // BLOCK_BYTES), parts):
            self._tensors[name] = _TensorBefore(tensor, blocks, digest(local, blocks))

    def _found(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in _entries(self._state):
            if isinstance(value, torch.Tensor):
                yield name, value
        for name, parameter in self._parameters():
            if isinstance(parameter, DTensor) or not (self._moves or is_lazy(parameter)):
                yield name, parameter

    def _read(self) -> dict[str, object]:
        values = {name: _value(each) for name, each in _entries(self._state)}
        return {name: value for name, value in values.items() if value is not None}

    def _read_objects(self) -> dict[str, dict[str, object]]:
        """Return what can be compared of the objects' states, by entry and path; if it is time."""
        if self._turn is None or not self._has_objects:
            return {}
        return {
            name: dict(_contents(name, value.state_dict(), turn=self._turn))
            for name, value in _entries(self._state)
            if callable(getattr(value, "state_dict", None)) and not isinstance(value, _OTHERWISE)
            if name.partition(".")[0] not in self._of_leader
        }

    def end_pass(self) -> None:
        """Raise ``ConfigError``, naming the first entry that the pass changed."""
        if (now := self._read()) != self._values:
            names = [*now, *self._values]
            raise ConfigError(
                _refusal(next(n for n in names if now.get(n) != self._values.get(n)), self._state)
            )
        for name, seen in self._tensors.items():
            if seen.has_changed():
                raise ConfigError(_refusal(name, self._state))
        for entry, after in self._read_objects().items():
            if (before := self._objects.get(entry)) is not None and after != before:
                path = next(n for n in [*after, *before] if after.get(n) != before.get(n))
                raise ConfigError(_refusal(path, self._state, entry=entry))
        self._tensors, self._objects = {}, {}


def keeps_own(state: Mapping[str, Any]) -> bool:
    """Return whether an entry of the tracked state is each rank's own."""
    return any(isinstance(value, PerRank) for _, value in _entries(state))


def _contents(name: str, state: Any, *, turn: int) -> Iterator[tuple[str, object]]:
    """Yield the values in an object's state, and digests of its tensors or of a sample of them."""
    leaves = dict(itertools.islice(leaves_of({name: state}), _MOST_ENTRIES))
    local = {n: local_of(each) for n, each in leaves.items() if isinstance(each, torch.Tensor)}
    parts = 1
    if turn >= _WHOLE_PASSES:
        parts = max(1, samples_of(sum(each.nbytes for each in local.values()), len(local)))
    for path, leaf in leaves.items():
        if (tensor := local.get(path)) is not None:
            first = (turn + zlib.crc32(path.encode())) % parts
            blocks = range(first, -(-tensor.nbytes // BLOCK_BYTES), parts)
            yield path, (tuple(tensor.shape), digest(tensor, blocks))
        elif (found := _value(leaf)) is not None:
            yield path, found


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return itertools.islice(leaves_of(state), _MOST_ENTRIES)


def _value(value: Any) -> object:
    """Return what can be compared of a value that is no tensor; None if nothing can."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray) and value.nbytes <= _ARRAY_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, LRScheduler):
        return value.last_epoch
    return state_of(value)


def _refusal(name: str, state: Mapping[str, Any], *, entry: str = "") -> str:
    entries = dict(_entries(state))
    value = entries.get(name)
    known = (entry or name) in entries
    own = "; or say that every rank keeps its own: holdfast.PerRank(...)" if known else ""
    if entry:
        own = f"; if it is a generator, draw from run.generator({entry!r}) in a microbatch{own}"
    remedy = (
        "change it after the pass, on all ranks alike, from values of all microbatches "
        f"(run.gather, run.reduce, run.metrics){own}"
    )
    if isinstance(value, LRScheduler):
        remedy = "call its step() once in the step, after run.step"
    elif isinstance(value, GENERATORS):
        remedy = (
            "inside a microbatch draw from the global generators, which the run seeds there, or "
            f"from run.generator({name!r}){own}"
        )
    return (
        f"run.track: {name} changed inside the pass over run.microbatches. Every rank runs other "
        f"microbatches, so it would depend on the number of ranks: {remedy}"
    )
