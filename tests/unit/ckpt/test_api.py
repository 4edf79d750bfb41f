"""Saving, loading and opening a whole training state in one process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from holdfast import ckpt
from holdfast.ckpt import api


class Net(nn.Module):
    """Tied weights, a buffer, two dtypes."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.body = nn.Linear(width, width).to(torch.bfloat16)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.embed(tokens).to(torch.bfloat16)).float())


def make(seed: int, *, width: int = 6) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.arange(11)).square().mean().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "progress": {"tokens": 100 * seed, "losses": [1.5, float("inf")]},
        "rng": ckpt.PerRank(random.Random(seed).getstate()),
        "loose": torch.randn(3).t(),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    states = zip(a["optimizer"].state.values(), b["optimizer"].state.values(), strict=True)
    return (
        all(
            torch.equal(x, y)
            for x, y in zip(
                a["model"].state_dict().values(), b["model"].state_dict().values(), strict=True
            )
        )
        and all(torch.equal(x[key], y[key]) for x, y in states for key in x)
        and a["optimizer"].param_groups[0]["lr"] == b["optimizer"].param_groups[0]["lr"]
        and a["progress"] == b["progress"]
        and a["rng"].value == b["rng"].value
        and torch.equal(a["loose"], b["loose"])
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    saved, other = make(1), make(2)
    path = Path(ckpt.save(tmp_path, saved, step=7))
    assert path == tmp_path / "step-000000000007"
    report = ckpt.load(tmp_path, other)
    assert report.step == 7
    assert same(saved, other)
    assert other["model"].head.weight is other["model"].embed.weight


def test_the_newest_is_loaded_and_any_can_be_asked_for(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        ckpt.save(tmp_path, make(step), step=step)
    state = make(0)
    assert ckpt.load(tmp_path, state).step == 10
    assert same(state, make(10))
    assert ckpt.load(tmp_path, state, step=2).step == 2
    assert same(state, make(2))
    with pytest.raises(ckpt.NotFoundError, match="step 3; steps there: 1, 2, 10"):
        ckpt.load(tmp_path, state, step=3)


def test_a_step_saved_again_is_the_new_one(tmp_path: Path) -> None:
    ckpt.save(tmp_path, make(1), step=1)
    ckpt.save(tmp_path, make(2), step=1)
    state = make(0)
    ckpt.load(tmp_path, state)
    assert same(state, make(2))
    assert len(list((tmp_path / "step-000000000001/data").iterdir())) == 1


def test_a_damaged_newest_step_falls_back_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        ckpt.save(tmp_path, make(step), step=step)
    (pack,) = (tmp_path / "step-000000000002/data").iterdir()
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.write_bytes(data)
    state = make(0)
    assert ckpt.load(tmp_path, state).step == 1
    assert same(state, make(1))
    assert str(pack) in caplog.text
    with pytest.raises(ckpt.CorruptError, match=str(pack)):
        ckpt.load(tmp_path, state, step=2)


def test_another_model_is_refused_with_its_keys_and_nothing_changes(tmp_path: Path) -> None:
    ckpt.save(tmp_path, make(1), step=1)
    other = make(2, width=4)
    with pytest.raises(ckpt.MismatchError, match=r"model\.body\.weight"):
        ckpt.load(tmp_path, other)
    assert same(other, make(2, width=4))
    with pytest.raises(ckpt.MismatchError, match="extra: model"):
        ckpt.load(tmp_path, {"net": Net()})


def test_what_cannot_be_saved_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ckpt.StateError, match=r"a\.b"):
        ckpt.save(tmp_path, {"a": {"b": object()}}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpt.save(tmp_path, make(1), step=1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(ckpt.StoreError, match="make room"):
        ckpt.save(tmp_path, make(2), step=2)
    monkeypatch.undo()
    state = make(0)
    assert ckpt.load(tmp_path, state).step == 1
    ckpt.save(tmp_path, make(2), step=2)
    assert ckpt.load(tmp_path, state).step == 2


def test_opened_without_a_model(tmp_path: Path) -> None:
    saved = make(1)
    path = Path(ckpt.save(tmp_path, saved, step=7))
    for place in (tmp_path, path):
        with ckpt.open(place) as checkpoint:
            assert checkpoint.step == 7
    weight = saved["model"].body.weight
    view = checkpoint["model.body.weight"]
    assert (view.shape, view.dtype, len(view)) == ((6, 6), torch.bfloat16, 6)
    assert {"model.head.weight", "loose"} <= set(checkpoint.keys())
    assert torch.equal(checkpoint["model.head.weight"][...], saved["model"].embed.weight)
    for key in (..., 0, -1, slice(1, 4), (slice(None), 2), (slice(0, 6, 2), slice(1, None, 3))):
        assert torch.equal(view[key], weight[key]), key
    assert view[4:2].shape == (0, 6)
    assert checkpoint["optimizer.state.model.body.weight.step"][...].item() == 1
    assert checkpoint.values["progress"] == {"tokens": 100, "losses": [1.5, float("inf")]}
    for key, said in (
        ((0, 0, 0), "3 indices"),
        (6, "out of range"),
        (slice(None, None, -1), "step"),
    ):
        with pytest.raises(IndexError, match=said):
            view[key]
    with pytest.raises(ckpt.NotFoundError, match=r"similar: .*model\.body\.weight"):
        checkpoint["body.weight"]


def test_as_a_zarr_group(tmp_path: Path) -> None:
    saved = make(1)
    ckpt.save(tmp_path, saved, step=7)
    group = ckpt.open(tmp_path).zarr()
    body = group["model.body.weight"]
    assert body.attrs["torch_dtype"] == "bfloat16"
    found = torch.from_numpy(body[1:3].view("int16")).view(torch.bfloat16)
    assert torch.equal(found, saved["model"].body.weight[1:3])
    with pytest.raises(ckpt.StoreError, match="immutable"):
        body[0] = 0


def test_a_pack_that_is_gone_is_an_error_not_a_fill_value(tmp_path: Path) -> None:
    ckpt.save(tmp_path, make(1), step=1)
    checkpoint = ckpt.open(tmp_path)
    (pack,) = (tmp_path / "step-000000000001/data").iterdir()
    pack.unlink()
    with pytest.raises(ckpt.CorruptError, match=f"{pack}: missing"):
        checkpoint["loose"][...]
    with pytest.raises(ckpt.CorruptError, match=f"{pack}: missing"):
        checkpoint.zarr()["loose"][...]
    with pytest.raises(ckpt.CorruptError, match=f"{pack}: missing"):
        ckpt.load(tmp_path, make(1))


def test_the_public_names() -> None:
    assert ckpt.__all__ == [
        "ArgumentError",
        "CapacityError",
        "Checkpoint",
        "CheckpointSink",
        "CheckpointSource",
        "CkptError",
        "CorruptError",
        "FencedError",
        "FlatShard",
        "MismatchError",
        "ModelParts",
        "NotFoundError",
        "PatternedSource",
        "Patterns",
        "PeerError",
        "PerRank",
        "Rebuilt",
        "RestoreReport",
        "StateError",
        "Stateful",
        "StoreError",
        "TensorShard",
        "TensorView",
        "VersionError",
        "load",
        "memory_need",
        "open",
        "save",
        "state_hash",
        "transfer",
    ]
    for name in ckpt.__all__:
        assert getattr(ckpt, name).__doc__
    assert dir(ckpt) == ckpt.__all__


def test_what_sidecars_import_does_not_import_torch() -> None:
    code = (
        "import sys, holdfast.ckpt.checkpoints.commit, holdfast.ckpt.checkpoints.catalog;"
        "import holdfast.ckpt.checkpoints.source, holdfast.ckpt.checkpoints.verify;"
        "import holdfast.ckpt.convert.rewrite;"
        "assert 'torch' not in sys.modules and 'zarr' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_step_may_be_any_integer(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"x": torch.ones(2)}, step=cast("int", torch.tensor(3)))
    with ckpt.open(tmp_path) as opened:
        assert opened.step == 3


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"step": -1}, "step is -1; give a number from 0 to 999999999999"),
    ({"step": 10**12}, "step is 1000000000000; give a number from 0"),
    ({"step": None}, "step is None; give a whole number"),
    ({"step": 1.5}, "step is 1.5; give a whole number"),
    ({"step": True}, "step is True; give a whole number"),
    ({"step": "1"}, "step is '1'; give a whole number"),
    (
        {"root": 7},
        "the root is 7; give a directory, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
    ),
    ({"root": b"x"}, "the root is b'x'; give a directory"),
    ({"state": nn.Linear(1, 1)}, "the state is a Linear; give a dict with names"),
    ({"state": []}, "the state is a list; give a dict with names"),
    ({"compression": "zstd"}, "compression is 'zstd'; give patterns"),
    ({"compression": {"*": 3}}, r"compression has '\*': 3; give texts"),
    ({"compression": {"*": "gzip"}}, "compression 'gzip' is not known; use none, zstd"),
    ({"base": "newest"}, "base is 'newest'; give an earlier step, or 'latest'"),
    ({"base": 1.5}, "base is 1.5; give a whole number"),
    ({"mesh": "dp"}, "mesh is 'dp'; give axes and their sizes"),
    ({"mesh": {"dp": "two"}}, r"mesh\['dp'\] is 'two'; give a whole number"),
    ({"mesh": {"dp": 2**64}}, r"mesh\['dp'\] is beyond any number of ranks"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_argument_is_named_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], message: str
) -> None:
    given = {"root": tmp_path / "root", "state": {"x": torch.ones(2)}, "step": 1, **wrong}
    with pytest.raises(ckpt.ArgumentError, match=message) as caught:
        ckpt.save(given.pop("root"), given.pop("state"), **given)
    assert isinstance(caught.value, ValueError)
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_of_readers_are_named(tmp_path: Path) -> None:
    ckpt.save(tmp_path, {"x": torch.ones(2)}, step=1)
    for wrong in (
        lambda: ckpt.load(None, {}),  # type: ignore[arg-type]
        lambda: ckpt.open(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ckpt.ArgumentError, match="the root is None; give a directory"):
            wrong()
    for state in (None, [], torch.nn.Linear(1, 1)):
        with pytest.raises(ckpt.ArgumentError, match=r"the state is a .*; give a dict with names"):
            ckpt.load(tmp_path, state)  # type: ignore[arg-type]
        with pytest.raises(ckpt.ArgumentError, match=r"the state is a .*; give a dict with names"):
            ckpt.state_hash(state)  # type: ignore[arg-type]
    with ckpt.open(tmp_path) as opened, pytest.raises(ckpt.NotFoundError, match="no tensor 1"):
        opened[1]  # type: ignore[index]


def test_what_save_returned_loads_and_is_no_root(tmp_path: Path) -> None:
    first, _ = (
        ckpt.save(tmp_path, {"x": torch.full((2,), float(step))}, step=step) for step in (1, 2)
    )
    x = torch.zeros(2)
    assert ckpt.load(first, {"x": x}).step == 1
    assert x.tolist() == [1, 1]
    with pytest.raises(ckpt.ArgumentError, match="the directory of step 1; give the root it is in"):
        ckpt.save(first, {"x": x}, step=3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(ckpt.StateError, match="x: a nested tensor"):
        ckpt.save(tmp_path, {"x": nested}, step=1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a\ud800": torch.ones(1)}, "lone surrogate"),
        ({"x": {"a\ud800": torch.ones(1)}}, "lone surrogate"),
        ({"x": ckpt.PerRank({"a": 10**5000})}, "an integer of 16610 bits"),
        ({"x": ckpt.PerRank("\ud800")}, "lone surrogate"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_a_byte_is_written(
    tmp_path: Path, state: dict[str, Any], said: str
) -> None:
    with pytest.raises(ckpt.StateError, match=said):
        ckpt.save(tmp_path, state, step=1)
    assert list(tmp_path.iterdir()) == []


def test_axes_that_are_none_are_refused(tmp_path: Path) -> None:
    for mesh, said in (({"\ud800": 1}, "lone surrogate"), ({"dp": 10**5000}, "beyond any number")):
        with pytest.raises(ckpt.ArgumentError, match=said):
            ckpt.save(tmp_path, make(1), step=1, mesh=mesh)


def test_a_save_waits_for_every_device_with_a_tensor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    far, near = torch.empty(2, device="meta"), torch.ones(2)
    api._await_devices([near, far, near, far])
    assert waited == [far.device]
