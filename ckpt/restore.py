"""Put saved bytes back into a live state of any layout, in place, and only verified ones."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ckpt import dtypes, plain
from ckpt.capture import box_of, flatten, spec_of
from ckpt.copying import copy_in
from ckpt.errors import CorruptError, MismatchError, NotFoundError
from ckpt.flatten import FlatState, decode_small_tensor
from ckpt.index import ChunkRef, ShardIndex
from ckpt.layout import Box, TensorSpec
from ckpt.optimizers import attach, empty_like
from ckpt.reshard import Copy, differences, mismatch, plan, saved_aliases, saved_specs
from ckpt.types import Json


class ShardSource(Protocol):
    """Where the shards of one step can be had: memory of sidecars, a checkpoint, a test.

    ``origin`` says in words where the bytes come from. ``read`` yields verified bytes only, in
    the order asked, and raises ``CorruptError`` for others; a view is valid until the next one.
    """

    @property
    def origin(self) -> str: ...

    def indexes(self) -> Sequence[ShardIndex]: ...

    def read(self, refs: Sequence[ChunkRef]) -> Iterator[tuple[ChunkRef, memoryview]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What was restored: ``bytes`` were read, per-rank values in ``kept`` had no saved one."""

    step: int
    generation: int
    bytes: int
    seconds: float
    tensors: int
    origin: str = ""
    kept: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Saved:
    """All writers' indexes, merged."""

    step: int
    generation: int
    indexes: Sequence[ShardIndex]
    specs: dict[str, TensorSpec]
    aliases: dict[str, str]
    values: dict[str, Json] = field(default_factory=dict)
    rank_values: dict[int, dict[str, Json]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: ShardSource) -> _Saved:
        indexes = source.indexes()
        if not indexes:
            raise NotFoundError(f"{source.origin}: holds no shard; choose another restore point")
        first = indexes[0]
        saved = cls(
            step=first.step,
            generation=first.generation,
            indexes=indexes,
            specs=saved_specs(indexes),
            aliases=saved_aliases(indexes),
        )
        for index in indexes:
            if (index.step, index.generation) != (first.step, first.generation):
                raise CorruptError(
                    f"{source.origin}: writer {index.writer} holds step {index.step} of generation "
                    f"{index.generation}, writer {first.writer} step {first.step} of "
                    f"{first.generation}; use another restore point"
                )
            saved.values |= index.values
            saved.rank_values[index.writer] = index.rank_values
        return saved


def restore(
    state: Mapping[str, Any], source: ShardSource, *, rank: int, strict: bool = True
) -> RestoreReport:
    """Overwrite ``state`` with what ``source`` holds, whatever layout that was saved in.

    Live tensors are filled in place, DTensors in their own sharding; optimizer state is created
    where missing; plain values are replaced and Stateful objects loaded. No communication.
    Nothing is touched before names, shapes and dtypes are found to fit (``MismatchError``). A
    ``CorruptError`` may leave the state half overwritten: restore from another source.
    """
    started = time.perf_counter()
    saved = _Saved.of(source)
    job = _Job(flatten(state), saved, rank=rank)
    if problems := job.problems(strict=strict):
        raise mismatch(problems, origin=source.origin)
    nbytes = job.fill(source)
    job.finish()
    return RestoreReport(
        step=saved.step,
        generation=saved.generation,
        bytes=nbytes,
        seconds=time.perf_counter() - started,
        tensors=len(job.targets),
        origin=source.origin,
        kept=job.kept,
    )


class _Job:
    """One restore: which live tensors receive which saved ones, then the rest of the state."""

    def __init__(self, flat: FlatState, saved: _Saved, *, rank: int) -> None:
        self._flat, self._saved = flat, saved
        self._own = saved.rank_values.get(rank, {})
        self.kept = tuple(name for name in flat.rank_setters if name not in self._own)
        self.targets: dict[str, list[torch.Tensor]] = {}
        self._tree_tensors: dict[str, torch.Tensor] = {}
        self._live_names: dict[str, list[str]] = {}
        for name, first in flat.aliases.items():
            self._live_names.setdefault(first, []).append(name)
        self._attached = [
            attach(parts, specs=saved.specs, values=saved.values, names_of=self._saved_names)
            for parts in flat.optimizers.values()
        ]
        self._collect()

    def _saved_names(self, fqn: str) -> list[str]:
        """Return the names that the live tensor ``fqn`` may have been stored under."""
        names = [fqn, *self._live_names.get(fqn, ())]
        return list(dict.fromkeys(self._saved.aliases.get(name, name) for name in names))

    def _stored(self, fqn: str) -> str:
        names = self._saved_names(fqn)
        return next((name for name in names if name in self._saved.specs), names[0])

    def _collect(self) -> None:
        owned = set[str]()
        for parts in self._flat.optimizers.values():
            owned |= parts.keys
        for name, tree in self._flat.trees.items():
            owned |= {fqn for fqn in tree.tensors if fqn.startswith(f"{name}.")}
        for fqn, tensor in self._flat.tensors.items():
            if fqn not in owned:
                self._add(self._stored(fqn), tensor)
        for attachment in self._attached:
            for fqn, tensor in attachment.targets:
                self._add(fqn, tensor)
        for name in self._flat.trees:
            for fqn in _tensor_names(self._saved.values.get(name)):
                self._add_tree_tensor(name, fqn)

    def _add(self, stored: str, tensor: torch.Tensor) -> None:
        self.targets.setdefault(stored, []).append(tensor)

    def _add_tree_tensor(self, name: str, fqn: str) -> None:
        """Make room for a tensor of a Stateful object: as its present one lies, else whole."""
        spec = self._saved.specs.get(fqn)
        if spec is None or fqn in self._tree_tensors:
            return
        live = self._flat.trees[name].tensors.get(fqn)
        dtype = dtypes.BY_NAME[spec.dtype]
        if live is not None and tuple(live.shape) == spec.shape:
            room = empty_like(live, dtype=dtype)
        else:
            device = live.device if live is not None else torch.device("cpu")
            room = torch.empty(spec.shape, dtype=dtype, device=device)
        self._tree_tensors[fqn] = room
        self._add(fqn, room)

    def problems(self, *, strict: bool) -> list[str]:
        """List what does not fit; drop what is missing where not ``strict``."""
        saved, flat = self._saved, self._flat
        want = {fqn: spec_of(fqn, tensors[0]) for fqn, tensors in self.targets.items()}
        found = differences(saved.specs, want, aliases={}, strict=strict)
        for fqn, tensors in self.targets.items():
            if any(spec_of(fqn, tensor) != want[fqn] for tensor in tensors):
                found.append(f"differs: {fqn} was saved once for tensors that are not alike now")
        for attachment in self._attached:
            found += [p for p in attachment.problems if strict or p.startswith("differs")]
        if not strict:
            for fqn in want.keys() - saved.specs.keys():
                del self.targets[fqn]
            return found
        optimizers = tuple(f"{name}.{part}." for name in flat.optimizers for part in _PARTS)
        live = {key for key in flat.values if not key.startswith(optimizers)}
        kept = {key for key in saved.values if not key.startswith(optimizers)}
        found += [f"extra: value {key} was saved and is not wanted" for key in sorted(kept - live)]
        found += [f"missing: value {key} was not saved" for key in sorted(live - kept)]
        return found

    def fill(self, source: ShardSource) -> int:
        """Read and copy every wanted byte; return how many were read."""
        want = {
            fqn: (spec_of(fqn, tensors[0]), tuple(box_of(fqn, tensor) for tensor in tensors))
            for fqn, tensors in self.targets.items()
        }
        reshard = plan(self._saved.indexes, want, strict=False)
        groups = list(reshard.by_chunk())
        read = source.read([group[0].ref for group in groups])
        for group, (_, data) in zip(groups, read, strict=True):
            for copy in group:
                _apply(copy, data, self.targets[copy.fqn][copy.box])
        return reshard.bytes

    def finish(self) -> None:
        """Put back everything that is not a tensor of its own."""
        for attachment in self._attached:
            attachment.apply()
        flat, saved = self._flat, self._saved
        for name, setter in flat.setters.items():
            if name in saved.values:
                setter(plain.decode(saved.values[name]))
        for name, tree in flat.trees.items():
            if name in saved.values:
                tree.load(plain.decode(saved.values[name], leaf=self._tree_leaf))
        for name, setter in flat.rank_setters.items():
            if name in self._own:
                setter(plain.decode(self._own[name], leaf=decode_small_tensor))

    def _tree_leaf(self, tag: str, payload: Any) -> Any:
        if tag == "$tensor":
            return self._tree_tensors[payload]
        if tag == "$rank":
            mine = self._own.get(payload, self._flat.rank_values.get(payload))
            return plain.decode(mine, leaf=decode_small_tensor)
        return plain.no_tags(tag, payload)


_PARTS = ("groups", "state")


def _tensor_names(value: Json) -> Iterator[str]:
    """Yield the tensors a Stateful object's saved tree refers to."""
    if isinstance(value, list):
        for item in value:
            yield from _tensor_names(item)
    elif isinstance(value, dict):
        if value.keys() == {"$tensor"}:
            yield value["$tensor"]
            return
        for item in value.values():
            yield from _tensor_names(item)


def _apply(copy: Copy, data: memoryview, tensor: torch.Tensor) -> None:
    copy_in(tensor, data, chunk_shape=copy.ref.chunk.box.shape, src=copy.src, dst=copy.dst)


def read_tensor(source: ShardSource, fqn: str, box: Box | None = None) -> torch.Tensor:
    """Return a saved tensor, or region ``box`` of it, as a fresh CPU tensor.

    Raises ``NotFoundError`` where no tensor of that name was saved.
    """
    return read_tensors(source, [fqn], boxes={} if box is None else {fqn: box})[fqn]


def read_tensors(
    source: ShardSource, fqns: Iterable[str], *, boxes: Mapping[str, Box] | None = None
) -> dict[str, torch.Tensor]:
    """Return saved tensors (whole, or their region in ``boxes``) as fresh CPU tensors."""
    indexes = source.indexes()
    specs, aliases = saved_specs(indexes), saved_aliases(indexes)
    want: dict[str, tuple[TensorSpec, tuple[Box, ...]]] = {}
    result: dict[str, torch.Tensor] = {}
    for fqn in fqns:
        spec = specs.get(aliases.get(fqn, fqn))
        if spec is None:
            raise NotFoundError(f"{source.origin}: no tensor {fqn} was saved; see its keys")
        box = (boxes or {}).get(fqn) or Box(offset=(0,) * len(spec.shape), shape=spec.shape)
        want[fqn] = (spec, (_inside(fqn, box, spec),))
        result[fqn] = torch.empty(box.shape, dtype=dtypes.BY_NAME[spec.dtype])
    reshard = plan(indexes, want, strict=False)
    groups = list(reshard.by_chunk())
    read = source.read([group[0].ref for group in groups])
    for group, (_, data) in zip(groups, read, strict=True):
        for copy in group:
            _apply(copy, data, result[copy.fqn])
    return result


def _inside(fqn: str, box: Box, spec: TensorSpec) -> Box:
    ends = [o + n for o, n in zip(box.offset, box.shape, strict=False)]
    if len(ends) != len(spec.shape) or any(e > s for e, s in zip(ends, spec.shape, strict=True)):
        raise MismatchError(f"{fqn}: {box} lies outside its shape {list(spec.shape)}")
    return box
