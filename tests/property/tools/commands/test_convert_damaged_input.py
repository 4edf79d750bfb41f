"""`holdfast convert` of damaged files converts or says what is wrong; it writes all or nothing."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from exploring import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.tools.cli import main

Damage = Callable[[bytes], bytes]

STATE: dict[str, Any] = {
    "model": {"w": torch.arange(20.0).view(5, 4), "b": torch.ones(3, dtype=torch.bfloat16)},
    "epoch": 3,
    "list": [1, torch.ones(2)],
}


def as_torch(folder: Path) -> None:
    torch.save(STATE, folder / "source")


def as_old_torch(folder: Path) -> None:
    torch.save(STATE, folder / "source", _use_new_zipfile_serialization=False)


def as_safetensors(folder: Path) -> None:
    save_file(STATE["model"], folder / "source", metadata={"by": "a test"})


def as_sharded_safetensors(folder: Path) -> None:
    as_checkpoint(folder / "root")
    how = ("--to", "safetensors", "--file-size", "64B", "--select", "model.*")
    assert convert(folder / "root", folder / "source", *how) == 0
    shutil.rmtree(folder / "root")


def as_dcp(folder: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=folder / "source")


def as_checkpoint(folder: Path) -> None:
    ckpt.save(folder if folder.name == "root" else folder / "source", STATE, step=1)


def as_zarr(folder: Path) -> None:
    as_checkpoint(folder / "root")
    assert convert(folder / "root", folder / "source", "--to", "zarr") == 0
    shutil.rmtree(folder / "root")


KINDS = {
    "torch": as_torch,
    "old torch": as_old_torch,
    "safetensors": as_safetensors,
    "sharded safetensors": as_sharded_safetensors,
    "dcp": as_dcp,
    "holdfast": as_checkpoint,
    "zarr": as_zarr,
}


def convert(source: Path, target: Path, *options: str) -> int:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["convert", str(source), str(target), *options])
    assert status == 0 or said.getvalue().strip(), "it failed without a word"
    assert "Traceback" not in said.getvalue()
    return status


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, make in KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind.replace(" ", "-"))
        make(made[kind])
    return made


@contextlib.contextmanager
def copied(original: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "copy"
        shutil.copytree(original, copy)
        yield copy


positions = st.integers(0, 1 << 16)


def cut(at: int) -> Damage:
    return lambda data: data[: at % (len(data) + 1)]


def flip(at: int, bit: int) -> Damage:
    def damaged(data: bytes) -> bytes:
        changed = bytearray(data)
        if changed:
            changed[at % len(data)] ^= 1 << bit
        return bytes(changed)

    return damaged


def write(at: int, other: bytes) -> Damage:
    def damaged(data: bytes) -> bytes:
        start = at % (len(data) + 1)
        return data[:start] + other + data[start + len(other) :]

    return damaged


def insert(at: int, other: bytes) -> Damage:
    def damaged(data: bytes) -> bytes:
        start = at % (len(data) + 1)
        return data[:start] + other + data[start:]

    return damaged


TOKENS = b'" { } [ ] -1 99999999999 null 1e999 \xff \x00 \\ud800'.split()
"""Pieces that change the sense of JSON, of a pickle or of a header."""

others = st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from(TOKENS))
damages = st.one_of(
    st.builds(cut, positions),
    st.builds(flip, positions, st.integers(0, 7)),
    st.builds(write, positions, others),
    st.builds(insert, positions, others),
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(which=st.integers(0, 63), changes=st.lists(damages, min_size=1, max_size=3))
def test_a_damaged_source_is_converted_or_refused_by_name(
    originals: dict[str, Path], kind: str, which: int, changes: list[Damage]
) -> None:
    with copied(originals[kind]) as folder:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        victim = files[which % len(files)]
        data = victim.read_bytes()
        for change in changes:
            data = change(data)
        victim.write_bytes(data)
        target = folder / "target"
        if convert(folder / "source", target) == 0:
            assert committed_steps(target)
        else:
            assert not target.exists() or not committed_steps(target)
