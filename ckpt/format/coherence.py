"""Consistency of a manifest with the indexes of its writers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import CRC_BYTES, Manifest, PackIndex, path_of, stored_bytes
from holdfast.ckpt.geometry.grid import fault_of_cover
from holdfast.ckpt.geometry.layout import Box


def check_packs(manifest: Manifest, packs: Mapping[int, PackIndex], *, origin: str) -> None:
    """Raise ``CorruptError`` unless the indexes fit the manifest and hold every tensor once."""
    if fault := next(_faults(manifest, packs), None):
        raise CorruptError(
            f"{origin}: {fault}; load another step, or restore its files from a copy"
        )


def _faults(manifest: Manifest, packs: Mapping[int, PackIndex]) -> Iterator[str]:
    boxes: dict[str, list[Box]] = {fqn: [] for fqn in manifest.tensors}
    for index in packs.values():
        yield from _faults_of_index(manifest, index)
        for fqn, tensor in index.tensors.items():
            boxes[fqn] += [chunk.box for chunk in tensor.chunks]
    for fqn, found in boxes.items():
        if fault := fault_of_cover(manifest.tensors[fqn].shape, found):
            yield f"tensor {fqn}: {fault}"
    yield from _faults_of_union(manifest, packs)
    yield from _doubly_used(packs.values())


def fault_of_listing(listed: PackIndex, own: PackIndex) -> str | None:
    """Return the difference between a writer's part of a register and its own index, if any."""
    if (listed.bases, listed.rank_values) != (own.bases, own.rank_values):
        return f"has other bases or values of writer {own.writer} than its index"
    held = {fqn: tensor for fqn, tensor in own.tensors.items() if tensor.chunks}
    there = {fqn: tensor for fqn, tensor in listed.tensors.items() if tensor.chunks}
    if odd := held.keys() ^ there.keys():
        return f"tensor {min(odd)}: its chunks of writer {own.writer} are listed in one place only"
    for fqn, tensor in held.items():
        chunks = sorted(tensor.chunks, key=lambda chunk: (chunk.base is not None, chunk.at))
        others = sorted(there[fqn].chunks, key=lambda chunk: (chunk.base is not None, chunk.at))
        padded = any(chunk.padded for chunk in chunks) and tensor.cell != there[fqn].cell
        if chunks != others or padded:
            return f"tensor {fqn}: its chunks of writer {own.writer} are not those of its index"
    return None


def _faults_of_index(manifest: Manifest, index: PackIndex) -> Iterator[str]:
    there = (index.run, index.step, index.generation, index.world_size)
    wanted = (manifest.run, manifest.step, manifest.generation, manifest.world_size)
    if there != wanted:
        yield (
            f"the index of writer {index.writer} is of run, step, generation and world size "
            f"{there}, the manifest of {wanted}"
        )
    for fqn, tensor in index.tensors.items():
        record = manifest.tensors.get(fqn)
        if record is None:
            yield f"writer {index.writer} has a tensor {fqn}, the manifest has none of that name"
        elif (record.dtype, record.shape) != (tensor.dtype, tensor.shape):
            yield (
                f"tensor {fqn}: writer {index.writer} has {tensor.dtype} {tensor.shape}, the "
                f"manifest {record.dtype} {record.shape}"
            )
        elif tensor.chunks and tensor.codec != record.codec:
            yield f"tensor {fqn}: writer {index.writer} has another codec than the manifest"


def _faults_of_union(manifest: Manifest, packs: Mapping[int, PackIndex]) -> Iterator[str]:
    values = {key: value for index in packs.values() for key, value in index.values.items()}
    if values != manifest.values:
        yield "the values of the indexes are not those of the manifest"
    aliases = {name: fqn for index in packs.values() for name, fqn in index.aliases.items()}
    if aliases != manifest.aliases:
        yield "the aliases of the indexes are not those of the manifest"


def _doubly_used(packs: Iterable[PackIndex]) -> Iterator[str]:
    """Find bytes of other steps' packs that two chunks claim: no saver writes that."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for index in packs:
        for tensor in index.tensors.values():
            for chunk in tensor.chunks:
                if chunk.base is not None:
                    end = chunk.at + stored_bytes(chunk, tensor) + CRC_BYTES
                    spans.setdefault(path_of(chunk, index), []).append((chunk.at, end))
    for path, used in spans.items():
        for (_, end), (at, _) in pairwise(sorted(used)):
            if at < end:
                yield f"two chunks share the bytes at offset {at} of {path}"
