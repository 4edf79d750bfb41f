"""A reader's own copy of saved tensors; a refresh reads only the chunks that differ.

The checksums in the snapshots' indexes tell which chunks differ: 32 bits for each chunk. A changed
chunk with an unchanged checksum, one in four thousand million, is taken for unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import torch

from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.geometry.layout import Box, TensorSpec
from holdfast.ckpt.geometry.reshard import plan, saved_aliases, saved_specs
from holdfast.ckpt.geometry.scatter import Array, ByChunk, grouped
from holdfast.ckpt.geometry.shard_index import ShardIndex
from holdfast.ckpt.state import torch_dtypes
from holdfast.ckpt.state.saved import ShardSource


@dataclass(slots=True)
class Replica:
    """Whole tensors on the CPU, and the checksum of every chunk that they are made of.

    ``sums`` maps a stored name to the checksums of its chunks, by box. It leaves out the chunks
    that a failed refresh may have overwritten; the next refresh reads those again.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, dict[Box, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refreshed:
    """The cost of a refresh: bytes that were read, and bytes that were present already."""

    read_bytes: int
    kept_bytes: int


def refresh(replica: Replica, source: ShardSource, fqns: Iterable[str]) -> Refreshed:
    """Copy the tensors ``fqns`` of ``source`` into the replica, in place; bytes read are verified.

    Pass the same names every time. Raises ``NotFoundError`` for a name that was not saved, and the
    errors of the source. After an error, do not use the tensors until a later refresh succeeds.
    """
    deliveries = _deliveries(replica, source.indexes(), fqns, origin=source.origin)
    found: dict[str, dict[Box, int]] = {}
    for ref, _ in deliveries:
        found.setdefault(ref.fqn, {})[ref.chunk.box] = ref.chunk.crc32c
    for stored, sums in found.items():
        known = replica.sums.get(stored, {})
        if not known.keys() <= sums.keys():
            known = {}  # the chunks are cut in another way and overlap those that are read
        replica.sums[stored] = {box: crc for box, crc in known.items() if sums[box] == crc}
    changed = [each for each in deliveries if each[0].chunk.box not in replica.sums[each[0].fqn]]
    read = source.scatter(changed) if changed else 0
    replica.sums.update(found)
    total = sum(ref.chunk.nbytes for ref, _ in deliveries)
    return Refreshed(read_bytes=read, kept_bytes=total - read)


def digest(indexes: Sequence[ShardIndex], fqns: Iterable[str]) -> str:
    """Return a digest of saved tensors: names, dtypes, shapes, and every chunk's box and checksum.

    No tensor is read. Equal digests mean equal tensors, as far as 32-bit checksums tell. The same
    tensors in another layout have another digest. Raises ``NotFoundError``.
    """
    specs, aliases = saved_specs(indexes), saved_aliases(indexes)
    result = blake2b(digest_size=16)
    for fqn in sorted(fqns):
        stored = aliases.get(fqn, fqn)
        spec = _spec(specs, fqn, stored, origin="the snapshot")
        chunks = sorted(
            (chunk.box.offset, chunk.box.shape, chunk.crc32c)
            for index in indexes
            if stored in index.tensors
            for chunk in index.tensors[stored].chunks
        )
        result.update(msgspec.json.encode((fqn, spec.dtype, spec.shape, chunks)))
    return result.hexdigest()


def _deliveries(
    replica: Replica, indexes: Sequence[ShardIndex], fqns: Iterable[str], *, origin: str
) -> ByChunk:
    """Return every chunk with the parts of the replica's tensors that it fills; make room first."""
    specs, aliases = saved_specs(indexes), saved_aliases(indexes)
    want: dict[str, tuple[TensorSpec, tuple[Box, ...]]] = {}
    arrays: dict[str, list[Array]] = {}
    for fqn in fqns:
        stored = aliases.get(fqn, fqn)
        spec = _spec(specs, fqn, stored, origin=origin)
        tensor, dtype = replica.tensors.get(fqn), torch_dtypes.BY_NAME[spec.dtype]
        if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, spec.shape):
            tensor = replica.tensors[fqn] = torch.empty(spec.shape, dtype=dtype)
            replica.sums.pop(stored, None)
        whole = Box(offset=(0,) * len(spec.shape), shape=spec.shape)
        want[fqn] = (spec, (whole,))
        arrays[fqn] = [torch_dtypes.as_carrier(tensor).numpy()]
    return grouped(plan(indexes, want, strict=False), arrays)


def _spec(specs: dict[str, TensorSpec], fqn: str, stored: str, *, origin: str) -> TensorSpec:
    if (spec := specs.get(stored)) is None:
        raise NotFoundError(f"{origin}: no tensor {fqn} was saved; see its keys")
    return spec
