"""Steps with a register are saved, opened, compared and removed as others are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from doubles.checkpoints import sample_arrays, split_dim, write_checkpoint
from doubles.memory_store import MemoryStore
from doubles.pruning import prune
from doubles.registers import built, writers_of

from holdfast import ckpt
from holdfast.ckpt.checkpoints.bases import needed_packs
from holdfast.ckpt.checkpoints.catalog import (
    latest,
    load_head,
    load_index,
    load_manifest,
    open_step,
)
from holdfast.ckpt.checkpoints.commit import WriterReceipt
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.unreferenced import unreferenced
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.convert.rewrite import reshard
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import CorruptError, FencedError, MismatchError, NotFoundError
from holdfast.ckpt.format.coherence import fault_of_listing
from holdfast.ckpt.format.manifest import REFS, PackIndex, WriterRecord, read_index
from holdfast.ckpt.format.sealed import seal
from holdfast.ckpt.geometry.layout import Box
from holdfast.ckpt.register import committing
from holdfast.ckpt.register.committing import write_register
from holdfast.ckpt.state.saved import SavedState, read_tensors
from holdfast.ckpt.store.local import LocalStore

WORLD = 5
ONE = Box(offset=(), shape=())
FOLDER = "step-000000000001"


def save(
    root: Path,
    *,
    step: int = 1,
    register_from: int = 2,
    base: int | None = None,
    generation: int = 1,
) -> list[WriterReceipt]:
    return write_checkpoint(
        root,
        sample_arrays(),
        world_size=WORLD,
        step=step,
        base=base,
        generation=generation,
        values={"lr": 0.5},
        aliases={"tied": "model.weight"},
        register_from=register_from,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path)
    return tmp_path


def register_file(root: Path) -> Path:
    (found,) = root.glob(f"{FOLDER}/index/*.register")
    return found


def state_of() -> dict[str, torch.Tensor]:
    return {
        fqn: torch.zeros(array.shape, dtype=getattr(torch, dtype))
        for fqn, (array, dtype) in sample_arrays().items()
    }


def test_a_step_with_a_register_loads_as_any_other(root: Path) -> None:
    assert latest(root) == 1
    state = state_of()
    report = ckpt.load(root, state, strict="ignore")
    assert report.extra == ("lr", "rank")
    for fqn, (array, _) in sample_arrays().items():
        assert state[fqn].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
    with ckpt.open(root) as opened:
        assert opened.values == {"lr": 0.5}
        assert torch.equal(opened["tied"][2:5], state["model.weight"][2:5])


def test_a_load_reads_the_places_of_what_it_wants_and_no_other(root: Path) -> None:
    with StoreSource(root, 1) as source:
        saved = SavedState.of(source)
        assert saved.indexes == ()
        assert saved.writers == WORLD
        assert saved.ranks["rank"].keys() == set(range(WORLD))
        assert saved.ranks["rank"][3] == 3
        part = saved.part_of(source, {"model.weight": [Box(offset=(4, 0), shape=(2, 7))]})
        assert [index.writer for index in part.indexes()] == [2]
        found = read_tensors(
            source, ["tied", "model.mask"], boxes={"tied": Box(offset=(3, 1), shape=(4, 2))}
        )
    weight, _ = sample_arrays()["model.weight"]
    np.testing.assert_array_equal(found["tied"].numpy(), weight[3:7, 1:3])
    np.testing.assert_array_equal(found["model.mask"].numpy(), sample_arrays()["model.mask"][0])


def test_a_name_that_was_not_saved_is_refused(root: Path) -> None:
    with StoreSource(root, 1) as source, pytest.raises(NotFoundError, match="no tensor nobody"):
        read_tensors(source, ["nobody"])


def test_the_manifest_of_many_writers_does_not_grow_with_them(root: Path) -> None:
    store = LocalStore(root)
    assert load_head(store, FOLDER).writers == ()
    assert len(load_manifest(store, FOLDER).writers) == WORLD
    assert store.size(f"{FOLDER}/{REFS}") is None


def test_a_step_saved_again_leaves_no_file_of_the_one_before(root: Path) -> None:
    store = LocalStore(root)
    for generation, register_from in ((2, WORLD + 1), (3, 2), (4, 2), (5, WORLD + 1)):
        save(root, register_from=register_from, generation=generation)
        has_register = register_from <= WORLD
        assert len([*root.glob(f"{FOLDER}/index/*.register")]) == has_register
        assert (root / FOLDER / REFS).exists() == (not has_register)
        assert load_manifest(store, FOLDER).generation == generation
        assert [*unreferenced(store)] == []
        assert len([*root.glob(f"{FOLDER}/data/*")]) == WORLD


def test_to_commit_again_is_harmless(root: Path) -> None:
    before = {path: path.stat().st_ino for path in root.rglob("*")}
    save(root)
    after = {path: path.stat().st_ino for path in root.rglob("*")}
    for path in (register_file(root), root / FOLDER / "manifest.json"):
        assert after[path] == before[path]
    assert after.keys() == before.keys()


def test_an_older_generation_leaves_nothing_behind(root: Path) -> None:
    save(root, generation=3)
    there = {*root.rglob("*")}
    with pytest.raises(FencedError):
        save(root, generation=2)
    assert {*root.rglob("*")} == there


def test_packs_that_a_register_needs_stay(root: Path) -> None:
    save(root, step=2, base=1)
    assert needed_packs(LocalStore(root))
    prune(root, keep_last=1)
    assert [*faults(LocalStore(root), 2, deep=True)] == []
    with ckpt.open(root, step=2) as opened:
        weight, _ = sample_arrays()["model.weight"]
        np.testing.assert_array_equal(opened["model.weight"][...].numpy(), weight)


def test_a_damaged_register_is_named_and_an_older_step_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, step=0)
    save(tmp_path)
    path = register_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    (fault,) = faults(LocalStore(tmp_path), 1, deep=False)
    assert fault.file == str(path)
    with pytest.raises(CorruptError, match=f"{path}: the block of .* load another step"):
        ckpt.load(tmp_path, state_of(), step=1, strict="ignore")
    assert ckpt.load(tmp_path, state_of(), strict="ignore").step == 0
    assert latest(tmp_path) == 0


def test_a_missing_register_is_named(root: Path) -> None:
    path = register_file(root)
    path.unlink()
    with pytest.raises(CorruptError, match=f"{path}: missing, the manifest lists it"):
        open_step(LocalStore(root), 1)


def test_a_missing_pack_is_found_by_the_rank_that_reads_it(root: Path) -> None:
    (pack,) = root.glob(f"{FOLDER}/data/00002-*.pack")
    pack.unlink()
    boxes = {"model.weight": Box(offset=(0, 0), shape=(2, 7))}
    with StoreSource(root, 1) as source:
        read_tensors(source, ["model.weight"], boxes=boxes)
        with pytest.raises(CorruptError, match=f"{pack}: missing"):
            read_tensors(source, ["model.weight"])


def other_chunks(index: PackIndex) -> PackIndex:
    tensor = index.tensors["model.weight"]
    chunks = tuple(msgspec.structs.replace(c, crc32c=c.crc32c ^ 1) for c in tensor.chunks)
    changed = {"model.weight": msgspec.structs.replace(tensor, chunks=chunks)}
    return msgspec.structs.replace(index, tensors=index.tensors | changed)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_chunks, "tensor model.weight: its chunks of writer 0 are not those"),
        (lambda i: msgspec.structs.replace(i, rank_values={}), "other bases or values of writer 0"),
        (
            lambda i: msgspec.structs.replace(
                i, tensors={f: t for f, t in i.tensors.items() if f != "model.phase"}
            ),
            "tensor model.phase: its chunks of writer 0 are listed in one place only",
        ),
    ],
)
def test_an_index_that_the_register_does_not_list_so_is_found(
    root: Path, change: Callable[[PackIndex], PackIndex], said: str
) -> None:
    store = LocalStore(root)
    manifest, packs = open_step(store, 1)
    own = load_index(store, FOLDER, manifest.writers[0])
    assert fault_of_listing(packs[0], own) is None
    assert said in str(fault_of_listing(packs[0], change(own)))


def test_boxes_that_are_no_zarr_chunks_are_refused_by_the_zarr_view(tmp_path: Path) -> None:
    boxes = [Box(offset=(at,), shape=(n,)) for at, n in ((0, 2), (2, 1), (3, 8))]
    arrays = {"flat": (np.arange(11, dtype="<f8"), "float64")}
    write_checkpoint(tmp_path, arrays, boxes={"flat": boxes}, world_size=3, register_from=3)
    with (
        ckpt.open(tmp_path) as opened,
        pytest.raises(MismatchError, match=r"tensor flat was saved .* \(holdfast convert"),
    ):
        opened.zarr()


def test_the_zarr_view_of_cells_needs_no_reference_map(root: Path) -> None:
    with ckpt.open(root) as opened:
        weight, _ = sample_arrays()["model.weight"]
        np.testing.assert_array_equal(opened.zarr()["model.weight"][...], weight)


def test_a_step_with_a_register_is_written_again_for_fewer_writers(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with StoreSource(root, 1) as source:
        reshard(source, out, layout=TargetLayout(mesh={"dp": 2}))
    with ckpt.open(out) as opened:
        assert opened.manifest.register is None
        for fqn, (array, _) in sample_arrays().items():
            raw = opened[fqn][...].reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == array.tobytes()


def test_split_boxes_are_as_the_test_says() -> None:
    assert split_dim((10, 7), parts=WORLD)[2] == Box(offset=(4, 0), shape=(2, 7))


def test_a_store_that_has_each_reader_wait_is_read_by_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committing, "_GROUP", 1)
    boxes = [(writer, Box(offset=(writer,), shape=(1,))) for writer in range(WORLD)]
    written = writers_of({"weight": ((WORLD,), boxes)}, world_size=WORLD)
    files = {record.writer: seal(index) for record, index in written}
    two = threading.Barrier(2)

    def load(record: WriterRecord) -> bytes:
        time.sleep(0.001)  # as long as the quickest of such stores takes
        if record.writer:
            two.wait(30)
        return files[record.writer]

    store = MemoryStore()
    head, _ = write_register(
        store,
        FOLDER,
        [record for record, _ in written],
        path="index/x.register",
        load=load,
        parse=lambda record, data: read_index(data, origin=str(record.writer)),
        mesh={},
        created_by={},
    )
    assert [record.writer for record in head.writers] == list(range(WORLD))
    assert store.read(f"{FOLDER}/index/x.register") == built(written)[1]


@pytest.mark.parametrize("group", [1, 2, WORLD])
def test_the_register_does_not_tell_how_many_indexes_were_read_together(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    monkeypatch.setattr(committing, "_GROUP", group)
    rows = [(writer, Box(offset=(writer, 0), shape=(1, 3))) for writer in range(WORLD)]
    cells = [(0, Box(offset=(0,), shape=(2,))), (3, Box(offset=(2,), shape=(2,)))]
    pieces = {"weight": ((WORLD, 3), rows), "bias": ((4,), cells), "step": ((), [(1, ONE)])}
    ranks = {writer: {"seed": writer} for writer in range(WORLD)}
    written = writers_of(
        pieces, world_size=WORLD, values={"lr": 0.5}, rank_values=ranks, aliases={"tied": "weight"}
    )
    files = {record.writer: seal(index) for record, index in written}
    store = MemoryStore()
    write_register(
        store,
        FOLDER,
        [record for record, _ in written],
        path="index/x.register",
        load=lambda record: files[record.writer],
        parse=lambda record, data: read_index(data, origin=str(record.writer)),
        mesh={},
        created_by={},
    )
    assert store.read(f"{FOLDER}/index/x.register") == built(written)[1]
