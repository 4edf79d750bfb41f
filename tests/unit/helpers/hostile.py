"""Checkpoints with valid seals and hostile content, and all ways to read one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import zarr
from checkpoint_states import copied
from doubles.checkpoints import split_dim, write_checkpoint
from doubles.memory_store import MemoryStore
from doubles.pruning import prune
from fault_stores import Wrapped, using

from holdfast.ckpt.checkpoints import fence
from holdfast.ckpt.checkpoints.assemble import Assembler
from holdfast.ckpt.checkpoints.catalog import latest, step_folder
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.errors import CorruptError
from holdfast.ckpt.format.manifest import MANIFEST, PackedChunk
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.native.isal import crc32c
from holdfast.ckpt.state import plain
from holdfast.ckpt.store.base import Readable, Store
from holdfast.ckpt.zarr.view import group

Json = Any
Change = Callable[[Json], object]
STEP = 2
FOLDER = step_folder(STEP)


def sample() -> MemoryStore:
    """Return a store with a step that has one of everything, and the base it refers to."""
    with using(store := MemoryStore()):
        for step in (1, STEP):
            rng = np.random.default_rng(step)
            arrays = {
                "frozen": (np.arange(24, dtype="<f4").reshape(6, 4), "float32"),
                "padded": (rng.integers(0, 99, (5, 3)).astype("<u2"), "bfloat16"),
                "packed": (np.full((40,), step, dtype="<i8"), "int64"),
                "uneven": (rng.integers(0, 99, (5,)).astype("|u1"), "uint8"),
            }
            boxes = {fqn: split_dim(a.shape, parts=2) for fqn, (a, _) in arrays.items()}
            uneven = [Box(offset=(0,), shape=(1,)), Box(offset=(1,), shape=(4,))]
            write_checkpoint(
                "memory://",
                arrays,
                boxes=boxes | {"padded": split_dim((5, 3), parts=2, dim=1), "uneven": uneven},
                world_size=2,
                step=step,
                base=1 if step == STEP else None,
                compression={"packed": "zstd"},
                values={"lr": 0.5, "tree": {"$tuple": [1, {"$map": [[1, 2]]}]}},
                aliases={"tied": "frozen"},
            )
    return store


def sealed(body: bytes) -> bytes:
    """Return a body in an envelope with the right checksum."""
    return b'{"crc32c":"%08x","body":%s}\n' % (crc32c(body), body)


def body_of(data: bytes) -> bytes:
    return data[len(sealed(b"")) - 2 : -2]


def encoded(value: Json) -> bytes:
    """Return JSON in its one spelling; the fields of chunks are put in order."""
    return msgspec.json.encode(_ordered(value))


def _ordered(value: Json) -> Json:
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = PackedChunk.__struct_fields__ if "box" in value else tuple(value)
    return {key: _ordered(value[key]) for key in fields if key in value}


def put_manifest(store: Store, body: bytes) -> None:
    store.write(f"{FOLDER}/{MANIFEST}", [sealed(body)])


def put_index(store: Store, body: bytes, *, writer: int = 0) -> None:
    """Write another index for a writer, and the manifest that lists it."""
    manifest = json.loads(body_of(store.read(f"{FOLDER}/{MANIFEST}")))
    record = manifest["merged"] if writer < 0 else manifest["writers"][writer]
    data = sealed(body)
    record["index"] |= {"nbytes": len(data), "crc32c": crc32c(data)}
    store.write(f"{FOLDER}/{record['index']['path']}", [data])
    put_manifest(store, encoded(manifest))


def index_name(store: Store, writer: int = 0) -> str:
    manifest = json.loads(body_of(store.read(f"{FOLDER}/{MANIFEST}")))
    record = manifest["merged"] if writer < 0 else manifest["writers"][writer]
    return f"{FOLDER}/{record['index']['path']}"


def with_manifest(good: MemoryStore, change: Change) -> MemoryStore:
    """Return a copy whose manifest was changed and sealed again."""
    store = copied(good)
    body = json.loads(body_of(store.read(f"{FOLDER}/{MANIFEST}")))
    change(body)
    put_manifest(store, encoded(body))
    return store


def with_index(good: MemoryStore, change: Change, *, writer: int = 0) -> MemoryStore:
    """Return a copy with an index that was changed, and sealed again with the manifest."""
    store = copied(good)
    body = json.loads(body_of(store.read(index_name(store, writer))))
    change(body)
    put_index(store, encoded(body), writer=writer)
    return store


class Watched(Wrapped):
    """Fails the test when something outside the steps and the fence is touched."""

    def about_to(self, operation: str, name: str) -> None:
        inside = operation == "names" or name.startswith("step-0000") or name == fence.FILE
        assert inside, f"{operation} of {name!r}"
        assert ".." not in name.split("/"), f"{operation} of {name!r}"

    def open(self, name: str) -> Readable:
        return super().open(name)


def read_all(store: Store) -> None:
    """Read the step in every way there is: natively, as Zarr, its values, by a deep check."""
    with using(Watched(store)), StoreSource("", STEP) as source:
        assembler = Assembler(source)
        for fqn in assembler.tensors:
            assembler.box(fqn)
        for index in source.indexes():
            for value in (*index.values.values(), *index.rank_values.values()):
                plain.decode(value, leaf=lambda tag, payload: (tag, str(payload)))
        view = group(source, portable=True)
        for name, array in view.arrays():
            read_array(name, array)
        msgspec.json.encode(source.manifest)


def read_array(name: str, array: zarr.Array[Any]) -> None:
    """Read an array; that zarr's own codec finds a wrong checksum is a clear refusal too."""
    try:
        array[...]
    except ValueError as error:
        assert "checksum" in str(error)
        raise CorruptError(f"{name}: {error}") from error


def check_all(store: Store) -> list[str]:
    """Return the messages of a deep check; it must not fail."""
    return [fault.message for fault in faults(Watched(store), STEP, deep=True)]


def find(store: Store) -> int | None:
    """Return the latest step, as people ask for it."""
    with using(Watched(store)):
        return latest("")


def clean(store: Store) -> None:
    """Prune, as people do."""
    with using(Watched(store)):
        prune("", keep_last=1)
