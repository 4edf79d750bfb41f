"""Every released version's stored sample still opens, and says what it said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_stock_zarr import expected, read

import ckpt
from ckpt.catalog import open_store
from ckpt.testing.checkpoints import sample_arrays
from ckpt.verify import faults

SAMPLES = sorted(Path(__file__).parent.glob("v*"))


@pytest.fixture(params=SAMPLES, ids=[path.name for path in SAMPLES])
def sample(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_a_sample() -> None:
    assert SAMPLES


def test_a_sample_opens(sample: Path) -> None:
    assert list(faults(open_store(sample), 42, deep=True)) == []
    with ckpt.open(sample) as checkpoint:
        assert checkpoint.step == 42
        assert checkpoint.values == {"optimizer.groups.0.lr": 0.1, "cursor": (1, 2)}
        assert checkpoint.manifest.run == "sample"
        assert checkpoint.manifest.generation == 5
        assert checkpoint.manifest.mesh == {"dp": 3}
        arrays = sample_arrays()
        assert set(checkpoint.keys()) == {*arrays, "model.tied"}
        for fqn, (array, dtype) in arrays.items():
            tensor = checkpoint[fqn][...]
            assert str(tensor.dtype) == f"torch.{dtype}"
            assert tuple(tensor.shape) == array.shape
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == array.tobytes()


def test_a_sample_opens_with_stock_zarr(sample: Path) -> None:
    done = read(sample / "step-000000000042", "--moved")
    assert done.returncode == 0, done.stderr
    wanted = expected()
    wanted |= {"model.tied": wanted["model.weight"]}
    assert json.loads(done.stdout)["arrays"] == wanted
