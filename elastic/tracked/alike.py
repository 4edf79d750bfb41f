"""Comparison of the state that several ranks hold: a restore would mix what differs.

A snapshot writes a tensor that several ranks hold from one of them, and the next tensor from
another. So what they hold must be equal. A freshly built state is compared as a whole, before and
after its first step. Later, every plain value and a sample of the tensors are compared now and
then; the sample goes round. Shards and pipeline stages are compared between the ranks that hold
the same box.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import torch

from holdfast.ckpt.agreement import agreeing
from holdfast.ckpt.geometry.layout import Region
from holdfast.ckpt.inspect.compare import leaves
from holdfast.ckpt.state import plain
from holdfast.ckpt.state.capture import CapturePlan, FlatState
from holdfast.ckpt.state.local_boxes import Leaf, local_of, regions, view_of
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups.contents import BLOCK_BYTES, digest, is_due, samples_of
from holdfast.elastic.tracked.cursor import KEY

_PARTS: Final = 64
_PARTS_PER_RANK: Final = 8
_SHOWN: Final = 80
_TENSOR, _VALUE, _APART = "tensor", "value", "\0"


class Gatherer(Protocol):
    """The part of a generation's world that this module needs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def gather(self, value: Json) -> list[Json]:
        """Return every rank's value, in rank order."""
        ...

    def max_(self, tensor: torch.Tensor) -> None:
        """Reduce to the element-wise maximum over the ranks, in place."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A region that other ranks hold too; equal ``key`` means equal bytes are expected."""

    key: str
    fqn: str
    region: Region
    nbytes: int
    first: int


class ReplicaCheck:
    """Compares the state of one generation's ranks; collective where a comparison is due.

    ``cell`` is the number of ranks that compute one microbatch together. Without ``exact`` they may
    round differently, so their floating-point tensors are compared only with those of ranks in the
    same place of other cells. ``restored``: the state came from one source, so that the comparison
    begins with the next snapshot, and a sample is enough. ``of_leader`` are entries whose plain
    values count at rank 0 alone, which writes them. Buffers of modules are equal as well, since
    every pass makes them so.
    """

    def __init__(
        self,
        world: Gatherer,
        *,
        cell: int,
        exact: bool,
        restored: bool,
        of_leader: Collection[str] = (),
    ) -> None:
        self._world, self._cell, self._exact = world, cell, exact
        self._of_leader = of_leader
        self._restored = restored
        self._count = int(restored)  # what was just restored is the same everywhere
        self._turn = self._largest = 0
        self._shared: Sequence[tuple[str, Region]] = ()
        self._units: list[_Unit] = []
        self._tags: dict[str, str] = {}

    def look(self, flat: FlatState, plan: CapturePlan, *, step: int) -> None:
        """Compare the state after ``step`` steps, if it is time to.

        Raises ``ConfigError`` at all ranks, naming two that differ.
        """
        number, self._count = self._count, self._count + 1
        if self._world.size == 1 or not is_due(number):
            return
        if plan.shared is not self._shared:
            self._arrange(flat, plan)
        whole = number <= 1 and not self._restored
        table = self._values(flat) | self._tensors(flat, parts=1 if whole else self._parts())
        head = zlib.crc32(msgspec.json.encode(sorted(table.items())))
        most, least = self._max(head, -head)
        if most == -least:
            return
        if (found := difference(self._world.gather(table))) is not None:
            key, one, other = found
            raise ConfigError(self._refusal(flat, key, one, other, step=step))

    def _arrange(self, flat: FlatState, plan: CapturePlan) -> None:
        self._shared = plan.shared
        self._tags = dict(_tags(flat))
        self._units = [self._unit(flat.tensors[fqn], fqn, region) for fqn, region in plan.shared]
        nbytes = sum(unit.nbytes for unit in self._units)
        (self._largest,) = self._max(samples_of(nbytes, len(self._units)))

    def _max(self, *values: int) -> list[int]:
        """Return the largest of all ranks' values, each by itself."""
        said = torch.tensor(values)
        self._world.max_(said)
        return [int(value) for value in said]

    def _unit(self, leaf: Leaf, fqn: str, region: Region) -> _Unit:
        box, local = region.box, local_of(leaf)
        tag = "" if box.shape == tuple(leaf.shape) else f"{box.offset} {box.shape}"
        if not box.shape:
            tag = self._tags.get(fqn, "")
        if self._cell > 1 and not self._exact and local.is_floating_point():
            tag += f" in place {self._world.rank % self._cell}"
        key = _key(_TENSOR, fqn, tag)
        nbytes = box.size * local.itemsize
        return _Unit(key=key, fqn=fqn, region=region, nbytes=nbytes, first=zlib.crc32(key.encode()))

    def _parts(self) -> int:
        """Return into how many samples the state is divided; each is compared in its turn."""
        most = max(_PARTS, _PARTS_PER_RANK * self._world.size)
        return min(max(self._largest, 1), most)

    def _values(self, flat: FlatState) -> dict[str, int]:
        return {
            _key(_VALUE, name, self._tags.get(name, "")): zlib.crc32(_text(flat.values[name]))
            for name in agreeing(flat)
            if name != KEY and name.partition(".")[0] not in self._of_leader
        }

    def _tensors(self, flat: FlatState, *, parts: int) -> dict[str, int]:
        turn, self._turn = self._turn, self._turn + 1
        found = {}
        for unit in self._units:
            blocks = range((turn - unit.first) % parts, -(-unit.nbytes // BLOCK_BYTES), parts)
            if blocks:
                view = view_of(flat.tensors[unit.fqn], unit.region)
                found[unit.key] = digest(view, blocks)
        return found

    def _refusal(self, flat: FlatState, key: str, one: int, other: int, *, step: int) -> str:
        kind, name, _ = key.split(_APART)
        said = ""
        if kind == _VALUE:
            name, said = self._two_values(flat, name, one, other)
        when = f"after step {step}" if step else "as it was built"
        entry = name.partition(".")[0]
        return (
            f"run.track: {name} differs between rank {one} and rank {other} {when}{said}. A "
            "restore would mix them: build and change it alike on all ranks (from the seed of the "
            "run, without run.rank; or load it on one rank and broadcast it), or say that every "
            f"rank keeps its own: run.track({entry}=holdfast.PerRank(...))"
        )

    def _two_values(self, flat: FlatState, name: str, one: int, other: int) -> tuple[str, str]:
        """Return the first path in a value at which two ranks differ, and what they have there."""
        described = {path: _shown(leaf) for path, leaf in leaves(flat.values.get(name), name)}
        everyone = self._world.gather(described)
        a, b = everyone[one], everyone[other]
        path = next(each for each in [*a, *b] if a.get(each) != b.get(each))
        return path, f": {a.get(path, 'nothing')} and {b.get(path, 'nothing')}"


def _key(kind: str, name: str, tag: str) -> str:
    return _APART.join((kind, name, tag))


def difference(tables: Sequence[dict[str, int]]) -> tuple[str, int, int] | None:
    """Return a key that two ranks have with different digests, and these ranks; or None."""
    first: dict[str, tuple[int, int]] = {}
    found: list[tuple[str, int, int]] = []
    for rank, table in enumerate(tables):
        for key, found_digest in table.items():
            owner, known = first.setdefault(key, (rank, found_digest))
            if known != found_digest:
                found.append((key, owner, rank))
    return min(found, default=None)


def _tags(flat: FlatState) -> Iterator[tuple[str, str]]:
    """Yield the optimizers' states of parts of parameters, with the parts that they belong to.

    A scalar among them (``step``) is one of its part: parts may have had different gradients.
    """
    for name, parts in flat.optimizers.items():
        prefix = f"{name}.state."
        own_regions = {
            member.fqn: regions(member.fqn, member.leaf)
            for members in parts.groups
            for member in members
        }
        for key in parts.keys:
            if not key.startswith(prefix):
                continue
            fqn = key.removeprefix(prefix).rpartition(".")[0]
            boxes = [(region.box.offset, region.box.shape) for region in own_regions.get(fqn, ())]
            leaf = flat.tensors.get(fqn)
            if leaf is not None and [shape for _, shape in boxes] != [tuple(leaf.shape)]:
                yield key, str(boxes)


def _text(value: Any) -> bytes:
    return msgspec.json.encode(plain.unordered(value), order="deterministic")


def _shown(value: Any) -> str:
    data = _text(value)
    text = data.decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({zlib.crc32(data):08x})"
