"""Sections persist, restore, reshard and verify: checkpoints on a disk."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holdfast import ckpt
from holdfast.ckpt.checkpoints import commit as persistence
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.convert.rewrite import reshard as rewrite
from holdfast.ckpt.convert.target_layout import TargetLayout
from holdfast.ckpt.errors import InternalError
from holdfast.ckpt.geometry.layout import chunk_range
from holdfast.ckpt.state.restore import restore as restore_state
from holdfast.ckpt.store.places import open_store
from holdfast.ckpt.testing.shards import capture
from holdfast.tools.bench.data_path.dcp_reshard import load_parts, save_parts
from holdfast.tools.bench.samples import BenchRow, BenchSetup, Case, in_turn, stopwatch, timed
from holdfast.tools.bench.state import BenchState, read_raw, write_raw

RAW_WRITE, RAW_READ, RAW_COPY = "file write + fsync", "preadv from page cache", "file copy + fsync"
RAW_SCAN = "read every file"
ARENA, SAVE, UNCHANGED = "from the arena", "ckpt.save", "ckpt.save, all as in the base"
SAME = "same layout"
DCP_SAVE, DCP_LOAD, SAFETENSORS = "DCP save", "DCP load", "safetensors load_file + copy"
VERIFY = "verify --deep"
CHANGES = ((4, 2), (2, 4), (4, 3), (4, 1))
FIXED_BYTES = 32 << 20
"""A state so small that the costs of a restore besides its bytes show."""
_STEP = 1
_PIECE = 8 << 20


def persist(setup: BenchSetup) -> list[BenchRow]:
    """Time new checkpoints until they are durable; each is removed before the next."""
    state = BenchState(setup.size_bytes, seed=0)
    index, payload = capture(state.tracked, step=_STEP)
    ckpt.save(setup.directory / "based", state.tracked, step=0)

    def from_arena(path: Path) -> None:
        receipt = persistence.write_pack(path, step=_STEP, index=index, payload=memoryview(payload))
        _commit(path, [receipt])

    cases = [
        _written(name, write, setup.directory / "written")
        for name, write in (
            (RAW_WRITE, lambda path: write_raw(state, path)),
            (ARENA, from_arena),
            (SAVE, lambda path: ckpt.save(path, state.tracked, step=_STEP)),
            (DCP_SAVE, lambda path: _dcp_save(state, path)),
        )
    ]
    samples = in_turn([*cases, _unchanged(state, setup.directory / "based")], setup)
    shutil.rmtree(setup.directory / "based")
    size = state.size_bytes
    return [
        samples.row("persist", name, size, RAW_WRITE, DCP_SAVE) for name in (ARENA, SAVE, UNCHANGED)
    ]


def _unchanged(state: BenchState, root: Path) -> Case:
    def case() -> Mapping[str, float]:
        with stopwatch() as seconds:
            ckpt.save(root, state.tracked, step=_STEP, base=0)
        shutil.rmtree(root / f"step-{_STEP:012d}")
        return {UNCHANGED: seconds[0]}

    return case


def _written(name: str, write: Callable[[Path], object], path: Path) -> Case:
    def case() -> Mapping[str, float]:
        with stopwatch() as seconds:
            write(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {name: seconds[0]}

    return case


def restore(setup: BenchSetup) -> list[BenchRow]:
    """Time loading into live tensors from the page cache, which the warm-up fills."""
    return _and_small(_restored, setup)


def _and_small(
    measure: Callable[[BenchSetup], list[BenchRow]], setup: BenchSetup
) -> list[BenchRow]:
    """Return the rows for the state, and for a larger one those of a small one too."""
    rows = measure(setup)
    if setup.size_bytes > FIXED_BYTES:
        small = replace(setup, size_bytes=FIXED_BYTES, lap=lambda: None)
        title = f"{FIXED_BYTES >> 20} MiB: "
        rows += [replace(row, name=f"{title}{row.name}") for row in measure(small)]
    return rows


def _restored(setup: BenchSetup) -> list[BenchRow]:
    state, target = BenchState(setup.size_bytes, seed=0), BenchState(setup.size_bytes, seed=1)
    place = setup.directory
    write_raw(state, place / "raw")
    ckpt.save(place / "same", state.tracked, step=_STEP)
    for ranks in sorted({saved for saved, _ in CHANGES}):
        save_as(state, place / str(ranks), ranks=ranks)
        parts = [parts_of(state, rank=rank, ranks=ranks)["state"] for rank in range(ranks)]
        save_parts(parts, place / f"dcp-{ranks}")
    _dcp_save(state, place / "dcp")
    wanted = cast("dict[str, Any]", target.tensors)
    reads: list[tuple[str, Callable[[], object]]] = [
        (RAW_READ, lambda: read_raw(target, place / "raw")),
        (SAME, lambda: ckpt.load(place / "same", target.tracked)),
        *(
            (_resharded_name(a, b), partial(load_as, target, place / str(a), ranks=b))
            for a, b in CHANGES
        ),
        (DCP_LOAD, lambda: dcp_load(wanted, checkpoint_id=place / "dcp", no_dist=True)),
        *((_dcp_name(a, b), partial(_dcp_reshard, target, place, a, b)) for a, b in CHANGES),
    ]
    with suppress(ModuleNotFoundError):
        reads.append((SAFETENSORS, _safetensors(state, target, place / "safetensors")))
    samples = in_turn([_read(name, read, state, target) for name, read in reads], setup)
    others = {_resharded_name(a, b): (_dcp_name(a, b),) for a, b in CHANGES} | {SAME: ()}
    rows = []
    for name, read in reads:
        if name in others:
            peers = (DCP_LOAD, *others[name], SAFETENSORS)
            extra = _costs(read, state.size_bytes)
            row = samples.row("restore", name, state.size_bytes, RAW_READ, *peers, extra=extra)
            rows.append(row)
    shutil.rmtree(place)
    place.mkdir()
    return rows


def _resharded_name(saved: int, wanted: int) -> str:
    return f"resharded {saved} → {wanted}"


def _dcp_name(saved: int, wanted: int) -> str:
    return f"DCP load, resharded {saved} → {wanted}"


def _dcp_reshard(target: BenchState, place: Path, saved: int, wanted: int) -> None:
    """Load a state as ``wanted`` ranks would, one after the other, by torch."""
    for rank in range(wanted):
        load_parts(parts_of(target, rank=rank, ranks=wanted)["state"], place / f"dcp-{saved}")


def _costs(read: Callable[[], object], wanted: int) -> list[tuple[str, float, str]]:
    """Return the read ratio and the peak memory of one more run, which is not timed."""
    tracemalloc.start()
    found = read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    nbytes = found.bytes if isinstance(found, ckpt.RestoreReport) else cast("int", found)
    return [
        ("bytes read / bytes wanted", nbytes / wanted, ""),
        ("peak extra memory", peak / (1 << 20), "MiB"),
    ]


def _safetensors(state: BenchState, target: BenchState, path: Path) -> Callable[[], object]:
    from safetensors.torch import load_file, save_file

    save_file(state.tensors, path)

    def read() -> None:
        found = load_file(path)
        for name, tensor in target.tensors.items():
            tensor.copy_(found[name])

    return read


def parts_of(state: BenchState, *, rank: int, ranks: int) -> dict[str, dict[str, ckpt.TensorShard]]:
    """Return the shards of one of ``ranks`` ranks under FSDP2's split of dim 0, as views."""
    parts = {}
    for name, tensor in state.tensors.items():
        start, extent = chunk_range(tensor.shape[0], parts=ranks, index=rank)
        offset = (start, *(0 for _ in tensor.shape[1:]))
        part = tensor[start : start + extent]
        parts[name] = ckpt.TensorShard(part, shape=tuple(tensor.shape), offset=offset)
    return {"state": parts}


def save_as(state: BenchState, root: Path, *, ranks: int) -> None:
    """Save a state as ``ranks`` ranks would."""
    offers: list[Any] = []
    for rank in range(ranks):  # collect the value that each rank would send to the others
        with suppress(_GatheredError):
            capture(
                parts_of(state, rank=rank, ranks=ranks),
                rank=rank,
                world_size=ranks,
                gather=partial(_tell, offers),
            )
    receipts = []
    for rank in range(ranks):
        index, payload = capture(
            parts_of(state, rank=rank, ranks=ranks),
            step=_STEP,
            rank=rank,
            world_size=ranks,
            gather=lambda _: offers,
        )
        view = memoryview(payload)
        receipts.append(persistence.write_pack(root, step=_STEP, index=index, payload=view))
    _commit(root, receipts)


def _commit(root: Path, receipts: Sequence[persistence.WriterReceipt]) -> None:
    first = receipts[0]
    persistence.commit(
        root,
        run=first.run,
        step=_STEP,
        generation=first.generation,
        receipts=receipts,
        mesh={"dp": len(receipts)},
    )


class _GatheredError(InternalError):
    pass


def _tell(offers: list[Any], value: Any) -> list[Any]:
    offers.append(value)
    raise _GatheredError


def load_as(target: BenchState, root: Path, *, ranks: int) -> int:
    """Load a state as ``ranks`` ranks would, one after the other; return the bytes read."""
    read = 0
    for rank in range(ranks):
        with StoreSource(root, _STEP) as source:
            part = parts_of(target, rank=rank, ranks=ranks)
            read += restore_state(part, source, rank=rank).bytes
    return read


def _read(name: str, read: Callable[[], object], state: BenchState, target: BenchState) -> Case:
    def case() -> Mapping[str, float]:
        target.wipe()
        with stopwatch() as seconds:
            read()
        state.require_equal(target, what=name)
        return {name: seconds[0]}

    return case


def _dcp_save(state: BenchState, path: Path) -> None:
    dcp_save(cast("dict[str, Any]", state.tensors), checkpoint_id=path, no_dist=True)


def reshard(setup: BenchSetup) -> list[BenchRow]:
    """Time rewriting a checkpoint of four ranks for two and for three."""
    return _and_small(_resharded, setup)


def _resharded(setup: BenchSetup) -> list[BenchRow]:
    state = BenchState(setup.size_bytes, seed=0)
    source_root = setup.directory / "four"
    save_as(state, source_root, ranks=4)

    def change(ranks: int, path: Path) -> None:
        with StoreSource(source_root, _STEP) as source:
            rewrite(source, path, layout=TargetLayout(mesh={"dp": ranks}))

    names = {ranks: f"4 → {ranks} writers" for ranks in (2, 3)}
    cases = [_written(RAW_COPY, partial(_copy, source_root), setup.directory / "written")]
    cases += [
        _written(name, partial(change, ranks), setup.directory / "written")
        for ranks, name in names.items()
    ]
    samples = in_turn(cases, setup)
    shutil.rmtree(source_root)
    return [samples.row("reshard", name, state.size_bytes, RAW_COPY) for name in names.values()]


def _copy(source: Path, target: Path) -> None:
    """Copy every file of a checkpoint into a new directory, durably."""
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def verify(setup: BenchSetup) -> list[BenchRow]:
    """Time the verification of every byte of a checkpoint in the page cache."""
    state = BenchState(setup.size_bytes, seed=0)
    root = setup.directory / "verified"
    save_as(state, root, ranks=2)

    def check() -> None:
        if found := list(faults(open_store(root), _STEP, deep=True)):
            raise ckpt.CorruptError(found[0].message)

    samples = in_turn([timed(RAW_SCAN, partial(_scan, root)), timed(VERIFY, check)], setup)
    shutil.rmtree(root)
    return [samples.row("verify", VERIFY, state.size_bytes, RAW_SCAN)]


def _scan(root: Path) -> None:
    """Read every file of a checkpoint on one thread, without verification."""
    room = memoryview(bytearray(_PIECE))
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(room):
                    pass
