"""ZeRO directories are read whole, or refused by name; no class of their pickles is made."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.zero import parameters, state_of, write_zero

from holdfast.ckpt.convert.deepspeed.zero_source import ZeroSource
from holdfast.ckpt.errors import CkptError, CorruptError, NotFoundError, StateError, StoreError
from holdfast.ckpt.geometry.grid import whole
from holdfast.ckpt.geometry.layout import Box


def tensor_of(source: ZeroSource, fqn: str, box: Box | None = None) -> torch.Tensor:
    box = box or whole(source.specs[fqn].shape)
    data = bytearray(source.read(fqn, box))
    return torch.frombuffer(data, dtype=torch.float32).view(box.shape)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_parameter_and_moment_is_whole(tmp_path: Path, stage: int, ranks: int) -> None:
    write_zero(tmp_path, stage=stage, ranks=ranks)
    with ZeroSource(tmp_path) as source:
        for name, value in parameters().items():
            assert torch.equal(tensor_of(source, f"model.{name}"), value)
            for key in ("exp_avg", "exp_avg_sq"):
                found = tensor_of(source, f"optimizer.state.model.{name}.{key}")
                assert torch.equal(found, state_of(name, key))
            assert tensor_of(source, f"optimizer.state.model.{name}.step") == 4
        assert source.step == 4
        assert source.values["optimizer.groups.1.params"] == ["model.b"]
        assert source.values["optimizer.groups.1.weight_decay"] == 0.125
        assert source.values["deepspeed.global_samples"] == 48
        assert source.specs["model.count"].dtype == "int64"


def test_a_box_is_read_across_the_partitions(tmp_path: Path) -> None:
    write_zero(tmp_path, stage=1, ranks=4)
    with ZeroSource(tmp_path) as source:
        box = Box(offset=(1, 1), shape=(2, 3))
        found = tensor_of(source, "model.w", box)
        assert torch.equal(found, parameters()["w"][1:3, 1:4])


def test_a_tag_is_read_by_itself_and_a_latest_elsewhere_is_not_followed(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=2)
    with ZeroSource(tag) as source:
        assert source.step == 4
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CorruptError, match="no directory beside it"):
        ZeroSource(tmp_path)
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(NotFoundError, match="global_step9"):
        ZeroSource(tmp_path)
    with pytest.raises(StoreError, match="copy it first"):
        ZeroSource("s3://bucket/run")


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=3, ranks=3)
    (tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(
        NotFoundError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing"
    ):
        ZeroSource(tmp_path)


def test_a_missing_last_rank_is_noticed(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=1, ranks=3)
    (tag / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(NotFoundError, match="3 ranks saved it, 2 have a file"):
        ZeroSource(tmp_path)


def test_two_checkpoints_in_one_directory_are_refused(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=1)
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(tag / name, tag / f"bf16_{name}")
    with pytest.raises(CorruptError, match="two checkpoints lie in one directory"):
        ZeroSource(tmp_path)


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_a_pickle_that_runs_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    fired = tmp_path / "fired"
    write_zero(tmp_path / "z", stage=1, optim=lambda found: found.update(extra=Bomb(fired)))
    with pytest.raises(StateError, match="which is refused"):
        ZeroSource(tmp_path / "z")
    assert not fired.exists()


def refused(tmp_path: Path, *, stage: int = 1, **changes: Any) -> str:
    write_zero(tmp_path, stage=stage, **changes)
    with pytest.raises(StateError) as error:
        ZeroSource(tmp_path)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "on the cpu"),
        ({"offload_param": {"device": "nvme"}}, "on the cpu"),
        ({"zero_quantized_nontrainable_weights": True}, "stored quantized"),
    ],
)
def test_layouts_that_are_not_read_are_named(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    def change(found: dict[str, Any]) -> None:
        found["ds_config"] = {"zero_optimization": settings}

    assert said in refused(tmp_path, stage=3, optim=change)


def test_offload_to_the_cpu_is_read(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["ds_config"] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

    write_zero(tmp_path, stage=3, optim=change)
    with ZeroSource(tmp_path) as source:
        assert torch.equal(tensor_of(source, "model.w"), parameters()["w"])


@pytest.mark.parametrize("count", [1, 3])
def test_other_partition_counts_are_refused(tmp_path: Path, count: int) -> None:
    def change(found: dict[str, Any]) -> None:
        found["optimizer_state_dict"]["partition_count"] = count

    said = refused(tmp_path, stage=3, optim=change)
    assert f"'partition_count' is {count}, and 2 ranks saved" in said


def test_elastic_checkpoints_are_refused(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["optimizer_state_dict"]["base_optimizer_state"] = [{}]

    assert "elastic_checkpoint" in refused(tmp_path, optim=change)


def test_experts_and_other_axes_are_refused(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["num_experts"] = [4]

    assert "experts are not read" in refused(tmp_path / "a", model=change)
    tag = write_zero(tmp_path / "b", stage=1)
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_01_model_states.pt")
    with pytest.raises(StateError, match="tensor or pipeline parallelism"):
        ZeroSource(tmp_path / "b")
    tag = write_zero(tmp_path / "c", stage=1)
    (tag / "layer_00-model_states.pt").touch()
    with pytest.raises(StateError, match="pipeline or expert parallelism"):
        ZeroSource(tmp_path / "c")


def test_a_checkpoint_without_zero_is_told_the_other_way(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=1)
    for path in tag.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(StateError, match="--from torch"):
        ZeroSource(tmp_path)


def damaged(tmp_path: Path, *, stage: int = 1, **changes: Any) -> str:
    write_zero(tmp_path, stage=stage, **changes)
    with pytest.raises(CorruptError) as error:
        ZeroSource(tmp_path)
    return str(error.value)


def test_a_partition_that_is_too_short_is_noticed(tmp_path: Path) -> None:
    def shorter(key: str) -> Any:
        def change(found: dict[str, Any]) -> None:
            flats = found["optimizer_state_dict"][key]
            flats[0] = flats[0][:-3].clone()

        return change

    said = damaged(tmp_path / "3", stage=3, optim=shorter("fp32_flat_groups"))
    assert "its parameters need" in said
    said = damaged(tmp_path / "1", optim=shorter("single_partition_of_fp32_groups"))
    assert "lies at 0 of rank 2" in said


def test_a_state_of_another_shape_is_refused(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["error"] = torch.ones(2)

    assert "states of other shapes" in refused(tmp_path, optim=change)


def test_steps_that_differ_between_ranks_are_noticed(tmp_path: Path) -> None:
    steps = iter([4.0, 5.0])

    def change(found: dict[str, Any]) -> None:
        state = found["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[0]["step"] = torch.tensor(next(steps))

    assert "the files are of different steps" in damaged(tmp_path, optim=change)


def test_a_dynamic_loss_scale_without_its_scaler_is_damage(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["optimizer_state_dict"]["dynamic_loss_scale"] = True

    assert "'loss_scaler' is a NoneType" in damaged(tmp_path, optim=change)


def test_a_loss_scale_that_a_script_passed_on_is_not_that_of_its_engine(tmp_path: Path) -> None:
    """A script may save the client state that it loaded from a universal directory."""

    def change(found: dict[str, Any]) -> None:
        found |= {"deepspeed_loss_scaler": {"cur_scale": 8.0}, "tokens": 3}

    write_zero(tmp_path, stage=1, model=change)
    with ZeroSource(tmp_path) as source:
        assert source.values["tokens"] == 3
        assert not [name for name in source.values if "loss_scaler" in name]


@pytest.mark.parametrize("key", ["global_steps", "dp_world_size"])
def test_a_missing_field_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    said = damaged(tmp_path, model=lambda found: found.pop(key))
    assert f"has no {key!r}" in said
    assert "mp_rank_00_model_states.pt" in said


def test_tied_and_frozen_parameters_and_client_state_are_named(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["module"] |= {"tied": found["module"]["w"], "still": torch.empty(0).bfloat16()}
        found["shared_params"] = {"tied": "w"}
        found["frozen_param_shapes"] = {"still": torch.Size([3])}
        found["frozen_param_fragments"] = {"still": torch.tensor([1.0, 2.0]).bfloat16()}
        found |= {"tokens": 7, "model": {"name": "x"}, "noise": [torch.ones(2), 3]}

    write_zero(tmp_path, stage=3, model=change)
    with ZeroSource(tmp_path) as source:
        assert source.aliases == {"model.tied": "model.w"}
        assert source.specs["model.still"].dtype == "bfloat16"
        raw = bytearray(source.read("model.still", whole((3,))))
        still = torch.frombuffer(raw, dtype=torch.bfloat16)
        assert still.tolist() == [1.0, 2.0, 1.0]
        assert (source.values["tokens"], source.values["noise.1"]) == (7, 3)
        assert source.values["client.model"] == {"name": "x"}
        assert source.specs["noise.0"].shape == (2,)


def test_a_frozen_part_of_another_length_is_noticed(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        found["module"]["still"] = torch.empty(0)
        found["frozen_param_shapes"] = {"still": torch.Size([3])}
        found["frozen_param_fragments"] = {"still": torch.ones(3)}

    assert "has a part of 3 elements, 2 are needed" in damaged(tmp_path, stage=3, model=change)


def test_any_truncated_file_is_an_error_of_ours(tmp_path: Path) -> None:
    tag = write_zero(tmp_path, stage=1)
    path = tag / "mp_rank_00_model_states.pt"
    data = path.read_bytes()
    for end in range(0, len(data), max(len(data) // 25, 1)):
        path.write_bytes(data[:end])
        with pytest.raises(CkptError):
            ZeroSource(tmp_path)
    path.write_bytes(pickle.dumps([1]))
    with pytest.raises(CkptError):
        ZeroSource(tmp_path)


JUNK: list[Any] = [None, -1, "text", [], {}, [{}], torch.ones(1), {"state": 1}]


def fields(content: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths of the fields of a file, two levels deep."""
    found: list[tuple[str, ...]] = []
    for key, item in content.items():
        found.append((key,))
        if isinstance(item, dict):
            found += [(key, inner) for inner in item if isinstance(inner, str)]
    return found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("file", ["model", "optim"])
def test_junk_in_any_field_is_an_error_of_ours_or_harmless(
    tmp_path: Path, stage: int, file: str
) -> None:
    tag = write_zero(tmp_path, stage=stage)
    (path, *_) = sorted(tag.glob(f"*{file}_states.pt"))
    content = torch.load(path, weights_only=True)
    for place in fields(content):
        for junk in JUNK:
            changed = dict(content)
            if len(place) > 1:
                changed[place[0]] = {**content[place[0]], place[1]: junk}
            else:
                changed[place[0]] = junk
            torch.save(changed, path)
            with contextlib.suppress(CkptError), ZeroSource(tmp_path) as source:
                for fqn, spec in source.specs.items():
                    source.read(fqn, whole(spec.shape))
