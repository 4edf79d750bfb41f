"""Write a checkpoint again: for another number of ranks, or as safetensors files.

Resharding streams piece by piece and does not import torch. The safetensors library wants whole
files in memory, so those are split.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ckpt.assemble import Assembler, Parts
from ckpt.errors import MismatchError, NotFoundError, StateError, StoreError
from ckpt.grid import cells, common_grid, split_grid, whole
from ckpt.index import Chunk, ChunkRef, ShardIndex, TensorEntry
from ckpt.layout import Box, chunk_range
from ckpt.persist import WriterReceipt, commit, new_tag, write_parts
from ckpt.source import StoreSource
from ckpt.store.local import LocalStore
from ckpt.view import TensorView

Progress = Callable[[int], None]

FILE_BYTES: Final = 2 << 30
"""A safetensors file holds at most this much, unless one tensor is larger."""

_UNKNOWN_TO_SAFETENSORS: Final = {
    "complex32",
    "complex128",
    "float4_e2m1fn_x2",
}


def boxes_of(parts: Parts, dp: int) -> list[Box]:
    """Return each rank's box of a tensor under FSDP2's split of dim 0 in ``dp``; may be empty."""
    if not parts.shape:
        return [whole(())]
    boxes = []
    for rank in range(dp):
        start, extent = chunk_range(parts.shape[0], parts=dp, index=rank)
        offset = (start, *(0 for _ in parts.shape[1:]))
        boxes.append(Box(offset=offset, shape=(extent, *parts.shape[1:])))
    return boxes


def layout_for(tensors: Mapping[str, Parts], dp: int) -> list[dict[str, TensorEntry]]:
    """Return what each of ``dp`` writers is to hold; scalars go where least lies.

    The chunks are as large as what is held in memory at once.
    """
    writers: list[dict[str, TensorEntry]] = [{} for _ in range(dp)]
    load = [0] * dp
    for fqn, parts in tensors.items():
        boxes = boxes_of(parts, dp)
        grid = common_grid(parts.shape, boxes)
        fine = None if grid is None else split_grid(grid, parts.shape, parts.dtype.itemsize)
        first = 0 if parts.shape else min(range(dp), key=load.__getitem__)
        for writer, box in enumerate(boxes, start=first):
            chunks = tuple(
                Chunk(box=part, at=0, nbytes=part.size * parts.dtype.itemsize, crc32c=0)
                for part in (() if fine is None else cells(box, fine))
            )
            load[writer] += sum(chunk.nbytes for chunk in chunks)
            if chunks:
                writers[writer][fqn] = _entry(parts, chunks, fine)
        writers[0].setdefault(fqn, _entry(parts, (), fine))
    return writers


def _entry(parts: Parts, chunks: tuple[Chunk, ...], grid: tuple[int, ...] | None) -> TensorEntry:
    return TensorEntry(dtype=parts.dtype.name, shape=parts.shape, chunks=chunks, grid=grid)


def reshard(
    source: StoreSource, target: str | Path, *, dp: int, progress: Progress = lambda _: None
) -> None:
    """Write ``source`` again below ``target`` as ``dp`` ranks would have saved it.

    Values of a rank that is not in the new world are left out.
    """
    manifest = source.manifest
    if Path(target).absolute() == Path(source.store.root):
        raise StoreError(f"{target}: source and target are the same; choose another target")
    assembler = Assembler(source)

    def payload(ref: ChunkRef) -> memoryview:
        progress(ref.chunk.nbytes)
        return assembler.bytes(ref.fqn, ref.chunk.box)

    receipts: list[WriterReceipt] = []
    for writer, tensors in enumerate(layout_for(assembler.tensors, dp)):
        leader = writer == 0
        old = source.packs.get(writer)
        index = ShardIndex(
            run=manifest.run,
            generation=manifest.generation,
            step=manifest.step,
            writer=writer,
            world_size=dp,
            payload_bytes=0,
            tensors=tensors,
            values=manifest.values if leader else {},
            rank_values=old.rank_values if old else {},
            aliases=manifest.aliases if leader else {},
        )
        receipts.append(
            write_parts(target, index=index, payload=payload, tag=new_tag(), verify=False)
        )
    commit(
        target,
        run=manifest.run,
        step=manifest.step,
        generation=manifest.generation,
        receipts=receipts,
        mesh={"dp": dp},
    )


def module_names(source: StoreSource) -> list[str]:
    """Return the top-level names that hold tensors and are not optimizers."""
    optimizers = {
        name.partition(".groups.")[0] for name in source.manifest.values if ".groups." in name
    }
    names = dict.fromkeys(fqn.partition(".")[0] for fqn in source.manifest.tensors)
    return [name for name in names if name not in optimizers]


def _prefix(source: StoreSource, name: str | None) -> str:
    names = module_names(source)
    if name is None and len(names) != 1:
        raise MismatchError(
            f"{source.origin}: holds the tensors of {', '.join(names) or 'no module'}; "
            "say with --name which are to be written"
        )
    chosen = names[0] if name is None else name
    if chosen not in names:
        raise NotFoundError(f"{source.origin}: no module {chosen!r}; there is {', '.join(names)}")
    return f"{chosen}."


def export_safetensors(
    source: StoreSource,
    target: str | Path,
    *,
    name: str | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Progress = lambda _: None,
) -> list[Path]:
    """Write the tensors of module ``name`` (needed only if there are several) to ``target``.

    One ``model.safetensors``, or several of at most ``file_bytes`` with the index that Hugging
    Face's loaders know; a tied tensor is written once, under its first name. Returns the files.
    """
    prefix = _prefix(source, name)
    assembler = Assembler(source)
    wanted = {
        fqn.removeprefix(prefix): parts
        for fqn, parts in assembler.tensors.items()
        if fqn.startswith(prefix)
    }
    serialize = _serializer(wanted)
    groups = _groups(wanted, file_bytes)
    store, files = LocalStore(target), []
    places: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, start=1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        content: dict[str, Any] = {}
        for short in names:
            parts = wanted[short]
            content[short] = TensorView(assembler, parts)[...]
            places[short] = file
            progress(content[short].nbytes)
            total += content[short].nbytes
        store.write(file, [serialize(content, {"format": "pt"})])
        files.append(Path(store.where(file)))
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        store.write("model.safetensors.index.json", [msgspec.json.encode(index)])
        files.append(Path(store.where("model.safetensors.index.json")))
    return files


def _groups(wanted: Mapping[str, Parts], file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = file_bytes
    for short, parts in wanted.items():
        size = whole(parts.shape).size * parts.dtype.itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = file_bytes
        groups[-1].append(short)
        room -= size
    return groups


def _serializer(tensors: Mapping[str, Parts]) -> Callable[[dict[str, Any], dict[str, str]], bytes]:
    """Return safetensors' own writer; checks first that it knows every dtype."""
    try:
        module = importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise StateError(
            "writing safetensors needs the package safetensors, which is not installed: "
            "pip install 'holdfast[safetensors]'"
        ) from error
    if bad := {parts.dtype.name for parts in tensors.values()} & _UNKNOWN_TO_SAFETENSORS:
        raise MismatchError(f"safetensors has no {', '.join(sorted(bad))}; export other tensors")
    save: Callable[[dict[str, Any], dict[str, str]], bytes] = module.save
    return save
