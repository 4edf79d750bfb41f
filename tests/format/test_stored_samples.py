"""Every released version's stored sample still opens with the same content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from make_sample import arrays_of
from test_stock_zarr import expected, read

from holdfast import ckpt
from holdfast.ckpt.checkpoints.catalog import committed_steps, load_index, noted, open_step
from holdfast.ckpt.checkpoints.verify import faults
from holdfast.ckpt.format.manifest import REFS, REGISTER_FORMAT
from holdfast.ckpt.store.local import LocalStore

SAMPLES = sorted(Path(__file__).parent.glob("v*"))


@pytest.fixture(params=SAMPLES, ids=[path.name for path in SAMPLES])
def sample(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def version_of(sample: Path) -> int:
    return int(sample.name.removeprefix("v"))


def test_there_is_a_sample_of_every_version() -> None:
    assert [version_of(path) for path in SAMPLES] == list(range(1, REGISTER_FORMAT + 1))


def test_a_sample_opens(sample: Path) -> None:
    assert list(faults(LocalStore(sample), 42, deep=True)) == []
    assert committed_steps(sample) == [42]
    with ckpt.open(sample) as checkpoint:
        assert checkpoint.step == 42
        assert checkpoint.values == {"optimizer.groups.0.lr": 0.1, "cursor": (1, 2)}
        assert checkpoint.manifest.run == "sample"
        assert checkpoint.manifest.generation == 5
        assert checkpoint.manifest.mesh == {"dp": 3}
        assert checkpoint.manifest.format == version_of(sample)
        arrays = arrays_of(version_of(sample))
        assert set(checkpoint.keys()) == {*arrays, "model.tied"}
        for fqn, (array, dtype) in arrays.items():
            tensor = checkpoint[fqn][...]
            assert str(tensor.dtype) == f"torch.{dtype}"
            assert tuple(tensor.shape) == array.shape
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == array.tobytes()


def test_a_sample_loads(sample: Path) -> None:
    arrays = arrays_of(version_of(sample))
    state = {
        fqn: torch.zeros(array.shape, dtype=getattr(torch, dtype))
        for fqn, (array, dtype) in arrays.items()
    }
    ckpt.load(sample, state, strict=False)
    for fqn, (array, _) in arrays.items():
        assert state[fqn].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("sample", SAMPLES[:2], ids=lambda path: path.name)
def test_a_sample_opens_with_stock_zarr(sample: Path) -> None:
    done = read(sample / "step-000000000042", "--moved")
    assert done.returncode == 0, done.stderr
    wanted = expected(arrays_of(version_of(sample)))
    wanted |= {"model.tied": wanted["model.weight"]}
    assert json.loads(done.stdout)["arrays"] == wanted


def test_the_sample_of_version_2_has_all_there_is() -> None:
    store = LocalStore(SAMPLES[1])
    manifest, packs = open_step(store, 42)
    assert manifest.merged
    merged = load_index(store, "step-000000000042", manifest.merged)
    assert set(merged.tensors) == {"optimizer.flat"}
    assert {path.split("/")[1] for path in manifest.bases()} == {"step-000000000040"}
    assert noted(store, "step-000000000040")
    names = {tensor.codec.name for tensor in manifest.tensors.values() if tensor.codec}
    assert names == {"zstd", "blosc"}
    assert any(c.padded for t in packs[2].tensors.values() for c in t.chunks)
    assert [index.rank_values for index in packs.values()] == [{"rank": n} for n in range(3)]
    size = sum(path.stat().st_size for path in SAMPLES[1].rglob("*") if path.is_file())
    assert size < 60_000


def test_the_sample_of_version_3_has_a_register_and_no_reference_map() -> None:
    store = LocalStore(SAMPLES[2])
    manifest, packs = open_step(store, 42)
    assert manifest.register
    assert manifest.refs is None
    assert manifest.merged is None
    assert store.size(f"step-000000000042/{REFS}") is None
    assert [index.rank_values for index in packs.values()] == [{"rank": n} for n in range(3)]
    assert {path.split("/")[1] for path in manifest.bases()} == {"step-000000000040"}
    assert any(c.padded for t in packs[2].tensors.values() for c in t.chunks)
    size = sum(path.stat().st_size for path in SAMPLES[2].rglob("*") if path.is_file())
    assert size < 60_000


def test_the_register_of_the_sample_names_what_the_indexes_of_version_2_name() -> None:
    _, ours = open_step(LocalStore(SAMPLES[2]), 42)
    _, theirs = open_step(LocalStore(SAMPLES[1]), 42)
    for writer, index in theirs.items():
        for fqn, tensor in index.tensors.items():
            if tensor.chunks:
                assert {*ours[writer].tensors[fqn].chunks} == {*tensor.chunks}
