"""Universal directories hold a state in full and give it back, or refuse it by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.interchange import read_all
from doubles.zero import write_zero
from torch import nn

from holdfast import ckpt
from holdfast.ckpt.convert.checkpoint import CheckpointSink, CheckpointSource
from holdfast.ckpt.convert.deepspeed.universal_sink import UniversalSink
from holdfast.ckpt.convert.deepspeed.universal_source import UniversalSource
from holdfast.ckpt.convert.deepspeed.zero_source import ZeroSource
from holdfast.ckpt.convert.interchange import TensorSource, transfer
from holdfast.ckpt.errors import CorruptError, MismatchError, NotFoundError, StateError, StoreError
from holdfast.ckpt.geometry.grid import whole

NOT_WRITTEN = {"foreach", "fused", "capturable", "differentiable"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2).bfloat16(), requires_grad=False)
        self.register_buffer("count", torch.tensor([7]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.mid(self.embed(tokens)))
        return found


def state(*, steps: int = 2, kind: Any = torch.optim.AdamW) -> dict[str, Any]:
    torch.manual_seed(1)
    net = Net()
    groups = [
        {"params": [net.embed.weight, net.mid.weight], "weight_decay": 0.1},
        {"params": [net.mid.bias], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        net(torch.arange(4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return {"model": net, "optimizer": optimizer, "schedule": schedule, "tokens": {"seen": 9}}


def saved(root: Path, content: dict[str, Any], step: int = 6) -> CheckpointSource:
    ckpt.save(root, content, step=step)
    return CheckpointSource.open(root)


def written(source: TensorSource, target: Path, **options: Any) -> Path:
    with UniversalSink(target) as sink:
        transfer(source, sink, step=getattr(source, "step", None), **options)
    return target


@pytest.mark.parametrize("memory", [8 << 20, 2 << 30])
def test_a_state_comes_back(tmp_path: Path, memory: int) -> None:
    source = saved(tmp_path / "h", state())
    written(source, tmp_path / "u", memory_bytes=memory)
    assert (tmp_path / "u" / "latest_universal").read_text() == "global_step6"
    with UniversalSource(tmp_path / "u") as back:
        assert back.step == 6
        assert back.aliases == {"model.head.weight": "model.embed.weight"}
        assert read_all(back) == read_all(source)
        values = {
            name.replace("schedule", "lr_scheduler"): value
            for name, value in source.values.items()
            if name.rpartition(".")[2] not in NOT_WRITTEN
        }
        assert {n: v for n, v in back.values.items() if not n.startswith("deepspeed.")} == values


def test_what_came_back_loads_into_the_script_s_objects(tmp_path: Path) -> None:
    content = state()
    written(saved(tmp_path / "h", content), tmp_path / "u")
    with UniversalSource(tmp_path / "u") as back, CheckpointSink(tmp_path / "h2") as sink:
        transfer(back, sink, step=back.step)
    fresh = state(steps=1)
    wanted = {"model": fresh["model"], "optimizer": fresh["optimizer"]}
    ckpt.load(tmp_path / "h2", {**wanted, "lr_scheduler": fresh["schedule"]}, strict=False)
    for one, other in zip(fresh["model"].parameters(), content["model"].parameters(), strict=True):
        assert torch.equal(one, other)
    assert fresh["schedule"].last_epoch == 2
    ours, theirs = (each["optimizer"].state_dict() for each in (fresh, content))
    assert ours["param_groups"] == theirs["param_groups"]
    for key, item in theirs["state"].items():
        assert all(torch.equal(ours["state"][key][name], item[name]) for name in item)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_zero_directory_becomes_universal(tmp_path: Path, stage: int) -> None:
    write_zero(tmp_path / "z", stage=stage)
    with ZeroSource(tmp_path / "z") as source:
        written(source, tmp_path / "u")
        with UniversalSource(tmp_path / "u") as back:
            assert read_all(back) == read_all(source)
            assert back.values["deepspeed.global_samples"] == 48


def test_16_bit_master_weights_are_read_and_not_written(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> None:
        flats = found["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats[:] = [flat.bfloat16() for flat in flats]

    write_zero(tmp_path / "z", stage=1, optim=change)
    with ZeroSource(tmp_path / "z") as source:
        assert source.specs["model.w"].dtype == "bfloat16"
        with pytest.raises(MismatchError, match=r"model\.\w is bfloat16"):
            written(source, tmp_path / "u")


def test_files_are_those_that_an_engine_loads(tmp_path: Path) -> None:
    written(saved(tmp_path / "h", state()), tmp_path / "u")
    tag = tmp_path / "u" / "global_step6"
    assert sorted(path.name for path in (tag / "zero").iterdir()) == [
        *("embed.weight", "mid.bias", "mid.weight", "optimizer_state.pt")
    ]
    step = torch.load(tag / "zero" / "mid.bias" / "step.pt", weights_only=True)
    assert step == 2
    found = torch.load(tag / "zero" / "optimizer_state.pt", weights_only=True)
    assert [group["weight_decay"] for group in found["param_groups"]] == [0.1, 0.0]
    for group in found["optimizer_state_dict"]["param_groups"]:
        assert "weight_decay" not in group  # an engine of stage 3 would give it to all groups
        assert group["betas"] == (0.9, 0.999)
    names = sorted(path.name for path in tag.glob("*model_states.pt"))
    assert names == ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    model = torch.load(tag / names[0], weights_only=True)
    assert set(model["module"]) == {"frozen", "count"}
    assert model["tokens"] == {"seen": 9}
    assert model["lr_scheduler"]["last_epoch"] == 2
    assert model["param_shapes"][1] == {"mid.bias": torch.Size([3])}


def refused(tmp_path: Path, content: dict[str, Any], **options: Any) -> str:
    source = saved(tmp_path / "h", content)
    with pytest.raises(MismatchError) as error:
        written(source, tmp_path / "u", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h"]
    return str(error.value)


def test_states_that_an_engine_cannot_have_are_refused(tmp_path: Path) -> None:
    content = state()
    said = refused(
        tmp_path / "two", {**content, "other": torch.optim.SGD(content["model"].parameters())}
    )
    assert "the optimizers optimizer, other" in said
    assert "optimizers none" in refused(tmp_path / "none", {"model": Net()})
    assert "has no state yet" in refused(tmp_path / "new", state(steps=0))
    bfloat = state()
    bfloat["model"].mid.weight.data = bfloat["model"].mid.weight.data.bfloat16()
    assert "is bfloat16" in refused(tmp_path / "bf16", bfloat)
    assert "are not among the tensors" in refused(
        tmp_path / "part", state(), select=["optimizer.*", "model.embed.*"]
    )
    taken = {**state(), "module": {"x": 1}}
    assert "another meaning" in refused(tmp_path / "taken", taken)


def test_steps_that_differ_are_refused_and_nothing_appears(tmp_path: Path) -> None:
    content = state()
    optimizer, net = content["optimizer"], content["model"]
    optimizer.state[net.mid.bias]["step"] += 1
    assert "one step for all parameters" in refused(tmp_path, content)


def test_a_factored_state_is_refused(tmp_path: Path) -> None:
    content = state(kind=torch.optim.Adafactor)
    assert "shaped as their parameters" in refused(tmp_path, content)


def test_sgd_without_momentum_has_no_state_and_with_it_comes_back(tmp_path: Path) -> None:
    def momentum(groups: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)

    source = saved(tmp_path / "h", state(kind=momentum))
    with UniversalSource(written(source, tmp_path / "u")) as back:
        assert read_all(back) == read_all(source)
    assert "has no state yet" in refused(tmp_path / "plain", state(kind=torch.optim.SGD))


def test_nothing_is_overwritten_and_an_unfinished_directory_goes(tmp_path: Path) -> None:
    source = saved(tmp_path / "h", state())
    written(source, tmp_path / "u")
    with pytest.raises(StoreError, match="already exists"):
        written(source, tmp_path / "u")
    with UniversalSink(tmp_path / "v") as sink:
        sink.begin(source.specs, aliases=source.aliases, values=source.values, step=1)
        name = "model.mid.bias"
        sink.write(name, whole((3,)), memoryview(bytearray(source.read(name, whole((3,))))))
        assert not (tmp_path / "v").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "u"]


def test_an_unfinished_transfer_is_not_published(tmp_path: Path) -> None:
    source = saved(tmp_path / "h", state())
    with UniversalSink(tmp_path / "v") as sink:
        sink.begin(source.specs, aliases=source.aliases, values=source.values, step=1)
        with pytest.raises(StateError, match="not written"):
            sink.finish()
    assert not (tmp_path / "v").exists()


def test_damaged_directories_are_named(tmp_path: Path) -> None:
    written(saved(tmp_path / "h", state()), tmp_path / "u")
    tag = tmp_path / "u" / "global_step6"
    path = tag / "zero" / "mid.bias" / "fp32.pt"
    torch.save({"param": torch.zeros(4)}, path)
    with pytest.raises(CorruptError, match=r"fp32\.pt: .*4 elements"):
        UniversalSource(tag)
    torch.save({"param": torch.zeros(3), "vocab_tensor": True}, path)
    with pytest.raises(StateError, match="tensor parallelism"):
        UniversalSource(tag)
    path.unlink()
    with pytest.raises(CorruptError, match=r"has no fp32\.pt"):
        UniversalSource(tag)
    (tag / "zero" / "optimizer_state.pt").unlink()
    with pytest.raises(NotFoundError, match="ds-zero"):
        UniversalSource(tag)
