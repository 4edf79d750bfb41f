"""torch.distributed.checkpoint saves and loads our format, in one process."""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import build, cause_of, empty_like, flip, mixed, put_back, same, state_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from holdfast import ckpt
from holdfast.adapters.dcp import HoldfastReader, HoldfastWriter
from holdfast.adapters.dcp.names import leaves, view_of
from holdfast.ckpt.checkpoints import redirects
from holdfast.ckpt.checkpoints.catalog import committed_steps
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError, StateError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)


def test_a_state_of_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = mixed(1)
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=4))
    found = empty_like(saved)
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert same(found, saved)


def test_a_root_that_stands_for_another_is_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redirects, "_instead", {})
    own, other, saved = tmp_path / "own", tmp_path / "other", mixed(1)
    redirects.redirect(own, to=str(other))
    dcp.save(saved, storage_writer=HoldfastWriter(own, step=4))
    dcp.save(
        saved, checkpoint_id=own / "step-000000000005", storage_writer=HoldfastWriter("x", step=1)
    )
    assert (own.exists(), committed_steps(other)) == (False, [4, 5])
    for step in (4, None):
        found = empty_like(saved)
        dcp.load(found, storage_reader=HoldfastReader(own, step=step))
        assert same(found, saved)


def test_what_dcp_saved_opens_without_it(tmp_path: Path) -> None:
    saved = mixed(1)
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=4, run="r"))
    with ckpt.open(tmp_path) as opened:
        assert (opened.step, opened.manifest.run) == (4, "r")
        assert same(opened["a.b.c.d"][1:3], saved["a.b"]["c.d"][1:3])
        assert same(opened["turned"][...], saved["turned"])
        assert opened.values["plain.tuple"] == (1, "text", b"bytes")
        assert opened["empty"].shape == (0, 3)


def test_a_model_saved_through_dcp_loads_with_ckpt_load(tmp_path: Path) -> None:
    parts = build(1)
    dcp.save(state_of(*parts), storage_writer=HoldfastWriter(tmp_path, step=1))
    other = build(2)[0]  # its weights are tied; DCP stored them under both names
    ckpt.load(tmp_path, {"model": other}, select="model.*", strict="ignore-extra")
    assert same(dict(other.state_dict()), dict(parts[0].state_dict()))


def test_a_training_state_goes_through_dcp_and_back(tmp_path: Path) -> None:
    parts, others = build(3), build(2)
    dcp.save(state_of(*parts), storage_writer=HoldfastWriter(tmp_path, step=3))
    state = state_of(*others)
    dcp.load(state, storage_reader=HoldfastReader(tmp_path, step=3))
    put_back(others, state)
    assert same(state_of(*others), state_of(*parts))


def test_what_ckpt_save_wrote_loads_through_dcp(tmp_path: Path) -> None:
    parts, others = build(3), build(2)
    native = dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))
    ckpt.save(tmp_path, native | {"seen": {"samples": 5}, "rng": ckpt.PerRank(1)}, step=3)
    state = state_of(*others) | {"seen": {"samples": 0}}
    dcp.load(state, storage_reader=HoldfastReader(tmp_path))
    put_back(others, state)
    assert same(state_of(*others), state_of(*parts))
    assert state["seen"] == {"samples": 5}


def test_nested_states_are_rebuilt_without_a_target(tmp_path: Path) -> None:
    saved = mixed(2)
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1))
    assert same(_load_state_dict_from_keys(storage_reader=HoldfastReader(tmp_path)), saved)
    part = _load_state_dict_from_keys("a.b", storage_reader=HoldfastReader(tmp_path))
    assert same(part, {"a.b": saved["a.b"]})


def test_a_native_checkpoint_becomes_the_state_dicts_that_torch_uses(tmp_path: Path) -> None:
    parts = build(3)
    ckpt.save(tmp_path, dict(zip(("model", "optimizer"), parts[:2], strict=True)), step=3)
    found = _load_state_dict_from_keys(storage_reader=HoldfastReader(tmp_path))
    weights, moments = get_state_dict(*parts[:2])
    assert same(found["model"], dict(weights))
    assert same(found["optimizer"]["state"], moments["state"])
    (group,) = found["optimizer"]["param_groups"]
    assert same(group, moments["param_groups"][0])


def test_a_state_that_is_not_flattened_comes_back_too(tmp_path: Path) -> None:
    saved = {"a.b": torch.randn(3), "options": {"x": {"y": 1}, "empty": {}}, "n": 3}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1), planner=planner)
    found = {"a.b": torch.zeros(3), "options": None, "n": 0}
    loader = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=HoldfastReader(tmp_path), planner=loader)
    assert same(found, saved)


def test_what_is_no_plain_value_is_refused_by_name(tmp_path: Path) -> None:
    bad = {"model": {"w": torch.ones(2)}, "extra": {"array": np.ones(3)}}
    with pytest.raises(CheckpointException) as failed:
        dcp.save(bad, storage_writer=HoldfastWriter(tmp_path, step=1))
    assert isinstance(cause_of(failed), StateError)
    assert str(cause_of(failed)).startswith("extra.array: cannot capture a value of type numpy")
    with pytest.raises(CheckpointException) as failed:
        dcp.save({"dcp.paths.0": 1}, storage_writer=HoldfastWriter(tmp_path, step=1))
    assert "are reserved; rename" in str(cause_of(failed))
    assert committed_steps(tmp_path) == []


class Progress:
    """A part of a state as torchtitan has it: tensors, and a pickle in a stream of bytes."""

    def __init__(self, losses: list[float]) -> None:
        self.step, self.losses = torch.tensor(len(losses)), losses

    def state_dict(self) -> dict[str, Any]:
        stream = io.BytesIO()
        torch.save(self.losses, stream)
        return {"step": self.step, "losses": stream, "none": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        state_dict["losses"].seek(0)
        self.losses = torch.load(state_dict["losses"])


class OwnBytes(DefaultSavePlanner):
    """Makes the bytes of objects itself."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object)


@pytest.mark.parametrize("planner", [DefaultSavePlanner, OwnBytes])
def test_streams_of_bytes_come_back(planner: type[DefaultSavePlanner], tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path, step=1)
    metadata = dcp.save(
        {"p": Progress([0.5, 0.25]), "raw": io.BytesIO(b"x")},
        storage_writer=writer,
        planner=planner(),
    )
    state = {"p": Progress([]), "raw": io.BytesIO()}
    dcp.load(state, storage_reader=HoldfastReader(tmp_path))
    assert state["p"].losses == [0.5, 0.25]  # type: ignore[union-attr]
    assert state["raw"].getvalue() == b"x"  # type: ignore[union-attr]
    theirs = dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "theirs")
    assert metadata.version == theirs.version == HoldfastReader(tmp_path).read_metadata().version


def test_no_pickle_in_a_stream_is_read(tmp_path: Path) -> None:
    stream = io.BytesIO(pickle.dumps(Evil(tmp_path / "called")))
    dcp.save({"s": stream}, storage_writer=HoldfastWriter(tmp_path, step=1))
    state = {"s": io.BytesIO()}
    dcp.load(state, storage_reader=HoldfastReader(tmp_path))
    with ckpt.open(tmp_path) as opened:
        assert opened.values["s"].getvalue() == stream.getvalue()
    assert state["s"].getvalue() == stream.getvalue()
    assert not (tmp_path / "called").exists()


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_dtype_is_converted_only_where_that_is_asked_for(tmp_path: Path) -> None:
    saved = {"w": torch.randn(3, 4), "v": torch.randn(3)}
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1))
    found = {"w": torch.zeros(3, 4, dtype=torch.bfloat16), "v": torch.zeros(3)}
    with pytest.raises(CheckpointException) as failed:
        dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert "w: was saved as float32, is to be loaded as torch.bfloat16" in str(cause_of(failed))
    assert isinstance(cause_of(failed), MismatchError)
    dcp.load(found, storage_reader=HoldfastReader(tmp_path, cast=True))
    assert same(found, {"w": saved["w"].to(torch.bfloat16), "v": saved["v"]})


def test_targets_that_are_views_are_filled_in_place(tmp_path: Path) -> None:
    saved = {"w": torch.randn(40, 30), "v": torch.randn(4)}
    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1))
    room = torch.zeros(30, 50)
    found = {"w": room.t()[5:45], "v": torch.zeros(8)[::2]}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert same(found, saved)
    assert torch.equal(room[:, 5:45].t(), saved["w"])
    assert room[:, :5].count_nonzero() == room[:, 45:].count_nonzero() == 0


def test_a_flipped_bit_is_noticed_here_and_not_by_dcp(tmp_path: Path) -> None:
    saved = {"quiet": torch.zeros(1000), "loud": torch.ones(1000)}
    found = {"quiet": torch.ones(1000), "loud": torch.zeros(1000)}
    dcp.save(saved, checkpoint_id=tmp_path / "theirs")
    (file,) = (tmp_path / "theirs").glob("*.distcp")
    flip(file, file.read_bytes().index(saved["loud"].numpy().tobytes()) + 2000)
    dcp.load(found, checkpoint_id=tmp_path / "theirs")
    assert not torch.equal(found["loud"], saved["loud"]), "loaded without a word"

    dcp.save(saved, storage_writer=HoldfastWriter(tmp_path / "ours", step=1))
    (file,) = (tmp_path / "ours").glob("*/data/*.pack")
    flip(file, file.read_bytes().index(saved["loud"].numpy().tobytes()) + 2000)
    with pytest.raises(CheckpointException) as failed:
        dcp.load(found, storage_reader=HoldfastReader(tmp_path / "ours"))
    assert isinstance(cause_of(failed), CorruptError)
    assert "loud" in str(cause_of(failed))
    assert str(file) in str(cause_of(failed))


class Failing(DefaultSavePlanner):
    """Fails when one tensor is asked for."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == "b":
            raise OSError("the process ends here")
        return super().resolve_data(write_item)


def test_a_save_that_broke_off_is_old_here_and_mixed_with_dcp(tmp_path: Path) -> None:
    old = {name: torch.zeros(5) for name in "abc"}
    new = {name: torch.ones(5) for name in "abc"}

    def again(writer: Callable[[], dcp.StorageWriter], reader: dcp.StorageReader) -> list[float]:
        dcp.save(old, storage_writer=writer())
        with pytest.raises(CheckpointException):
            dcp.save(new, storage_writer=writer(), planner=Failing())
        found = {"a": torch.full((5,), 2.0), "c": torch.full((5,), 2.0)}
        dcp.load(found, storage_reader=reader)
        return [found["a"].mean().item(), found["c"].mean().item()]

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    per_item = partial(dcp.FileSystemWriter, theirs, single_file_per_rank=False)
    assert again(per_item, dcp.FileSystemReader(theirs)) == [1, 0], "two saves in one state"
    assert again(partial(HoldfastWriter, ours, step=1), HoldfastReader(ours)) == [0, 0]


def test_a_step_saved_again_is_the_new_one(tmp_path: Path) -> None:
    for value in range(3):
        dcp.save({"a": torch.full((5,), value)}, storage_writer=HoldfastWriter(tmp_path, step=1))
        found = {"a": torch.zeros(5, dtype=torch.int64)}
        dcp.load(found, storage_reader=HoldfastReader(tmp_path, step=1))
        assert found["a"].tolist() == [value] * 5
    assert len(list(tmp_path.glob("*/data/*.pack"))) == 1


def test_plans_may_be_cached(tmp_path: Path) -> None:
    class Caching(DefaultSavePlanner):
        def __init__(self) -> None:
            super().__init__(enable_plan_caching=True)

    for step in range(1, 4):
        saved = mixed(step)
        saved["plain"] = {"number": step}
        writer = HoldfastWriter(tmp_path, step=step)
        dcp.save(saved, storage_writer=writer, planner=Caching())
    assert committed_steps(tmp_path) == [1, 2, 3]
    for step in range(1, 4):
        found = _load_state_dict_from_keys(storage_reader=HoldfastReader(tmp_path, step=step))
        assert same(found, mixed(step) | {"plain": {"number": step}})


class Waiting(DefaultSavePlanner):
    """Holds the save up until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.begun.set()
        assert self.go.wait(30)
        return super().resolve_data(write_item)


def test_an_asynchronous_save_shows_when_it_is_committed(tmp_path: Path) -> None:
    saved, planner = {"w": torch.ones(4), "n": 1}, Waiting()
    writer = HoldfastWriter(tmp_path, step=1)
    future: Any = dcp.async_save(saved, storage_writer=writer, planner=planner)
    assert planner.begun.wait(30)
    saved["w"].zero_()  # staged before async_save returned
    assert committed_steps(tmp_path) == []
    planner.go.set()
    future.result(30)
    assert committed_steps(tmp_path) == [1]
    found = {"w": torch.zeros(4), "n": 0}
    dcp.load(found, storage_reader=HoldfastReader(tmp_path))
    assert same(found, {"w": torch.ones(4), "n": 1})


def test_a_checkpoint_id_is_a_root_or_a_step_in_one(tmp_path: Path) -> None:
    saved, found = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    writer = HoldfastWriter(tmp_path / "unused", step=7)
    dcp.save(saved, checkpoint_id=tmp_path / "a", storage_writer=writer)
    dcp.save(saved, checkpoint_id=tmp_path / "a/step-000000000009", storage_writer=writer)
    assert committed_steps(tmp_path / "a") == [7, 9]
    reader = HoldfastReader(tmp_path / "unused")
    dcp.load(found, checkpoint_id=tmp_path / "a/step-000000000007", storage_reader=reader)
    assert same(found, saved)
    assert reader.checkpoint_id == str(tmp_path / "a/step-000000000007")
    dcp.load(found, storage_reader=HoldfastReader(tmp_path / "a/step-000000000009"))
    assert HoldfastWriter.validate_checkpoint_id(tmp_path)
    assert not HoldfastReader.validate_checkpoint_id("gopher://elsewhere")


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(4)}, storage_writer=HoldfastWriter(tmp_path, step=7))
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"w": torch.ones(4)}, storage_reader=HoldfastReader(tmp_path, step=8))
    assert isinstance(cause_of(failed), NotFoundError)
    assert "no checkpoint of step 8; steps there: 7" in str(cause_of(failed))
    (manifest,) = tmp_path.glob("*/manifest.json")
    flip(manifest, 40)
    with pytest.raises(CheckpointException) as failed:
        dcp.load({"w": torch.ones(4)}, storage_reader=HoldfastReader(tmp_path, step=7))
    assert isinstance(cause_of(failed), CorruptError)
    with pytest.raises(CorruptError):
        HoldfastReader(tmp_path).read_metadata()


def test_ranks_that_opened_different_steps_are_stopped(tmp_path: Path) -> None:
    plans = []
    for step in (1, 2):
        dcp.save({"w": torch.ones(4)}, storage_writer=HoldfastWriter(tmp_path, step=step))
        reader = HoldfastReader(tmp_path)
        reader.set_up_storage_reader(reader.read_metadata(), True)
        plans.append(reader.prepare_local_plan(LoadPlan([])))
        reader.reset()
    with pytest.raises(MismatchError, match=r"found the steps \[1, 2\]"):
        reader.prepare_global_plan(plans)
    assert reader.prepare_global_plan(plans[:1]) == plans[:1]


def test_ranks_that_do_not_plan_together_are_refused(tmp_path: Path) -> None:
    writer = HoldfastWriter(tmp_path, step=1)
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    with pytest.raises(StateError, match="leave use_collectives at True"):
        writer.prepare_local_plan(SavePlan([]))


class Forgetful(DefaultSavePlanner):
    """Makes its final plan anew."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return SavePlan(new_plan.items)


class Halving(DefaultSavePlanner):
    """Transforms tensors and pickles objects by itself."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        return object.half()


def test_planners_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    saved = {"w": torch.ones(4), "n": 1}
    with pytest.raises(CheckpointException) as failed:
        dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1), planner=Forgetful())
    assert "Forgetful dropped the storage_data" in str(cause_of(failed))
    with pytest.raises(CheckpointException) as failed:
        dcp.save(saved, storage_writer=HoldfastWriter(tmp_path, step=1), planner=Halving())
    assert "w: the planner gave torch.float16 (4,), it had planned float32" in str(cause_of(failed))
    planner = Halving()
    dcp.save({"n": 1}, storage_writer=HoldfastWriter(tmp_path, step=2), planner=planner)
    assert ckpt.open(tmp_path).values["n"] == 1
    with pytest.raises(CheckpointException) as failed:
        writer = HoldfastWriter(tmp_path, step=3)
        dcp.save({"n": Path("p")}, storage_writer=writer, planner=Halving())
    assert str(cause_of(failed)).startswith("n: Halving makes bytes of it that are no plain value")


def test_leaves_are_those_of_dcp() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    for state in (mixed(1), {"x": [[{}], [[1], [2]], [], {}], "y": OrderedDict(a=[{"b": (1,)}])}):
        marked: Any = {key: without_tensors(value) for key, value in state.items()}
        _, paths = flatten_state_dict(marked)
        assert [path for path, _ in leaves((), marked)] == list(paths.values())


def without_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value)((key, without_tensors(item)) for key, item in value.items())
    if isinstance(value, list):
        return [without_tensors(item) for item in value]
    return {"tensor": 0} if isinstance(value, torch.Tensor) else value


def test_optimizer_names_become_those_of_dcp() -> None:
    view = view_of(
        ["net.w", "net.b", "head.w", "opt.state.net.b.m", "opt.state.net.w.m"],
        aliases={"net.tied": "net.w"},
        values={
            "opt.groups.0.params": ["net.w", "net.b"],
            "opt.groups.0.lr": 0.5,
            "opt.state.net.b.flag": True,
            "object": {"a": {"$tensor": "net.tied"}, "b": {"$rank": "object.b"}, "c": [1]},
            "step": 3,
        },
    )
    assert view.tensors["opt.state.b.m"] == "opt.state.net.b.m"
    assert view.tensors["net.tied"] == view.tensors["object.a"] == "net.w"
    assert view.values == {
        "opt.param_groups.0.params": ["w", "b"],
        "opt.param_groups.0.lr": 0.5,
        "opt.state.b.flag": True,
        "object.c": [1],
        "step": 3,
    }
    assert view.paths["opt.state.w.m"] == ("opt", "state", "w", "m")
    assert view.paths["opt.param_groups.0.lr"] == ("opt", "param_groups", 0, "lr")
