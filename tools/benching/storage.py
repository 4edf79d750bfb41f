"""Sections save and load: durable checkpoints beside a plain file and beside torch's own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckpt
from tools.benching.samples import Case, Row, Setup, in_turn, stopwatch
from tools.benching.state import State, read_raw, write_raw

RAW_WRITE, RAW_READ = "file write + fsync", "file readinto, cached"
SAVE, LOAD = "ckpt.save", "ckpt.load, verified"
DCP_SAVE, DCP_LOAD = "DCP save", "DCP load"


def save(setup: Setup) -> list[Row]:
    """Time new checkpoints until they are durable; each is removed before the next."""
    state = State(setup.size_bytes, seed=0)
    cases = [
        _written(name, write, setup.directory / "written")
        for name, write in (
            (RAW_WRITE, lambda path: write_raw(state, path)),
            (SAVE, lambda path: ckpt.save(path, state.tracked, step=1)),
            (DCP_SAVE, lambda path: _dcp_save(state, path)),
        )
    ]
    samples = in_turn(cases, setup)
    return [samples.row("save", SAVE, state.size_bytes, reference=RAW_WRITE, peer=DCP_SAVE)]


def _written(name: str, write: Callable[[Path], object], path: Path) -> Case:
    def case() -> Mapping[str, float]:
        with stopwatch() as seconds:
            write(path)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {name: seconds[0]}

    return case


def load(setup: Setup) -> list[Row]:
    """Time loading into live tensors from the page cache, where the warm-up has brought it."""
    state, target = State(setup.size_bytes, seed=0), State(setup.size_bytes, seed=1)
    raw, ours, peer = (setup.directory / name for name in ("raw", "ours", "dcp"))
    write_raw(state, raw)
    ckpt.save(ours, state.tracked, step=1)
    _dcp_save(state, peer)
    wanted = cast("dict[str, Any]", target.tensors)
    cases = [
        _read(name, read, state, target)
        for name, read in (
            (RAW_READ, lambda: read_raw(target, raw)),
            (LOAD, lambda: ckpt.load(ours, target.tracked)),
            (DCP_LOAD, lambda: dcp_load(wanted, checkpoint_id=peer, no_dist=True)),
        )
    ]
    samples = in_turn(cases, setup)
    raw.unlink()
    shutil.rmtree(ours)
    shutil.rmtree(peer)
    return [samples.row("load", LOAD, state.size_bytes, reference=RAW_READ, peer=DCP_LOAD)]


def _read(name: str, read: Callable[[], object], state: State, target: State) -> Case:
    def case() -> Mapping[str, float]:
        target.wipe()
        with stopwatch() as seconds:
            read()
        state.require_equal(target, what=name)
        return {name: seconds[0]}

    return case


def _dcp_save(state: State, path: Path) -> None:
    dcp_save(cast("dict[str, Any]", state.tensors), checkpoint_id=path, no_dist=True)
