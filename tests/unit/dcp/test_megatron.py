"""Megatron-core's additions to directories of DCP: no code of theirs runs."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import zipfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from holdfast.adapters.dcp import DcpSource
from holdfast.adapters.dcp.megatron import is_megatron, read_common
from holdfast.ckpt.errors import CorruptError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Backend(Enum):
    AUTO = 5


class Touch:
    """An object whose pickle makes a directory when it is read by ``pickle.load``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def megatron(folder: Path, state: dict[str, Any], common: object = None) -> Path:
    """Write a directory as Megatron-core does, with the classes of plans in its metadata."""
    dcp.save(state, checkpoint_id=folder)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if common is not None:
        torch.save(common, folder / "common.pt")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.all_local_plans = [SavePlan(items=[])]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_classes_of_plans_are_stand_ins(tmp_path: Path) -> None:
    path = megatron(tmp_path / "m", {"w": torch.arange(4.0)})
    with DcpSource(path) as source:
        assert list(source.specs) == ["w"]
        assert (source.step, source.told, source.values) == (None, (), {})


def test_a_stand_in_where_a_tensor_should_be_is_refused(tmp_path: Path) -> None:
    path = megatron(tmp_path / "m", {"w": torch.arange(4.0)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"] = SavePlan(items=[])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptError, match="'w': is neither a tensor nor an object"):
        DcpSource(path)


def test_common_values_are_read_and_no_code_of_the_file_runs(tmp_path: Path) -> None:
    common = {
        "iteration": 12,
        "args": argparse.Namespace(layers=2, dtype=torch.bfloat16, backend=Backend.AUTO),
        "lists": [1, (2, None), Touch(tmp_path / "touched"), {"deep": {3, 4}}],
        "tensor": torch.ones(2),
        5: "five",
    }
    path = megatron(tmp_path / "m", {"w": torch.arange(4.0)}, common)
    with DcpSource(path) as source:
        assert source.step == 12
        assert source.values == {
            "common.iteration": 12,
            "common.args": {"$map": [["layers", 2], ["dtype", {"$torch": ["dtype", "bfloat16"]}]]},
            "common.lists": [1, {"$tuple": [2, None]}, {}],
            "common.5": "five",
        }
        (told,) = source.told
    assert "common.args.backend" in told
    assert "common.lists.2 (posix.mkdir)" in told
    assert "common.tensor" in told
    assert not (tmp_path / "touched").exists()


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("common/data.pkl", data)


def bomb() -> object:
    found: object = [0]
    for _ in range(40):
        found = [found, found]
    return {"args": found}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (pickle.dumps([1]), "holds no dict"),
        (b"\x80\x02.", "cannot be read"),
        (b"\x80\x02r\xff\xff\xff\x7f.", "cannot be read"),
        (pickle.dumps(bomb()), "more than 1000000 entries"),
        (pickle.dumps({"a": [[]]})[:-4], "cannot be read"),
    ],
)
def test_a_common_file_that_makes_no_sense_is_refused(
    tmp_path: Path, data: bytes, said: str
) -> None:
    archive(tmp_path / "common.pt", data)
    with pytest.raises(CorruptError, match=said):
        read_common(tmp_path)


def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    archive(tmp_path / "common.pt", pickle.dumps({}), zipfile.ZIP_DEFLATED)
    with pytest.raises(CorruptError, match=r"is not as torch\.save writes it"):
        read_common(tmp_path)
    (tmp_path / "common.pt").write_bytes(b"text")
    with pytest.raises(CorruptError, match=r"is no archive of torch\.save"):
        read_common(tmp_path)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    found: object = 1
    for _ in range(100):
        found = {"a": found}
    archive(tmp_path / "common.pt", pickle.dumps({"deep": found}))
    with pytest.raises(CorruptError, match="or 64 levels"):
        read_common(tmp_path)


def test_states_of_a_run_are_left_out_and_other_objects_refused(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "rng_state/shard_0_1": Backend.AUTO,
        "a._extra_state/shard_0_1": io.BytesIO(b"x"),
    }
    with DcpSource(megatron(tmp_path / "m", state)) as source:
        assert next(iter(source.specs)) == "w"
        assert source.values.keys() == {"a._extra_state/shard_0_1"}
        assert "rng_state/shard_0_1" in source.told[0]
    moments = {"optimizer.distributed.dp_group_idx_0.param_state": Backend.AUTO}
    path = megatron(tmp_path / "old", {"w": torch.ones(2), **moments})
    with pytest.raises(StateError, match=r"param_state.* save again .* fully_reshardable"):
        DcpSource(path)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ('{"sharded_backend": "torch_dist"}', True),
        ('{"sharded_backend": "zarr"}', False),
        ("[]", False),
        ("{", False),
    ],
)
def test_the_config_file_tells_a_directory_of_megatron(
    tmp_path: Path, text: str, is_one: bool
) -> None:
    assert not is_megatron(tmp_path)
    (tmp_path / "metadata.json").write_text(text)
    assert is_megatron(tmp_path) is is_one
