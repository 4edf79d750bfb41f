"""The commands that read checkpoints work at s3:// as in a directory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from doubles.checkpoints import sample_arrays, write_checkpoint
from object_places import S3Place

from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.store.places import open_store
from holdfast.tools.cli import main


@pytest.fixture
def root(s3_place: S3Place, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_place.environment.items():
        monkeypatch.setenv(name, value)
    for step in (1, 2):
        write_checkpoint(
            s3_place.url, sample_arrays(step), world_size=2, step=step, values={"loss": step}
        )
    return s3_place.url


def test_checkpoints_in_a_bucket_are_looked_at_and_pruned(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", f"{root}/step-000000000001", "--layout", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], len(found["layout"])) == (1, [1, 2], 8)
    assert main(["cat", root, "model.weight[3:5]", "--json"]) == 0
    wanted = sample_arrays(2)["model.weight"][0][3:5]
    shown = np.array(json.loads(capsys.readouterr().out)["values"], "<f4")
    np.testing.assert_array_equal(shown, wanted)
    assert main(["diff", root, root, "--step-a", "1"]) == 1
    assert "loss: 1 -> 2" in capsys.readouterr().out
    assert main(["verify", root, "--all", "--deep"]) == 0
    assert main(["prune", root, "--keep-last", "1", "--pin", "1"]) == 0
    assert committed_steps(root) == [1, 2]
    assert main(["prune", root, "--keep-last", "1", "--unpin", "1"]) == 0
    assert committed_steps(root) == [2]


def test_damage_in_a_bucket_is_found_and_named(
    root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(root)
    (pack, *_) = [name for name in store.names("step-000000000002/data") if name[:5] == "00001"]
    name = f"step-000000000002/data/{pack}"
    data = bytearray(store.read(name))
    data[3] ^= 1
    store.write(name, [bytes(data)])
    assert main(["verify", root, "--deep", "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["steps"]["2"]["faults"]
    assert (fault["file"], fault["tensor"], fault["offset"]) == (
        store.where(name),
        "model.weight",
        0,
    )
