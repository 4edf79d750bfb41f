"""Strategies of Fabric get Holdfast's checkpoints; other classes are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.adapters.lightning import holdfast_strategy, random_states
from holdfast.adapters.lightning.saving import HoldfastSaving
from holdfast.adapters.lightning.trainer_saving import TrainerSaving
from holdfast.ckpt import ArgumentError, MismatchError, PerRank

CPU = torch.device("cpu")
FABRIC = "lightning.fabric.strategies.ddp"


def strategy(name: str, module: str = FABRIC, base: type = object) -> Any:
    return type(name, (base,), {"__module__": module})


def test_a_supported_strategy_and_its_subclasses_save_by_holdfast() -> None:
    for name in ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy"):
        kind = strategy(name)
        made = holdfast_strategy(kind)
        assert issubclass(made, kind)
        assert made.save_checkpoint is HoldfastSaving.save_checkpoint
        assert made is holdfast_strategy(kind)
    own = strategy("Own", "script", strategy("DDPStrategy"))
    assert holdfast_strategy(own).__name__ == "HoldfastOwn"
    assert holdfast_strategy(strategy("DDPStrategy", "lightning_fabric.strategies.ddp"))


def test_a_strategy_of_the_trainer_saves_in_the_trainers_way() -> None:
    kind = strategy("DDPStrategy", "lightning.pytorch.strategies.ddp")
    assert holdfast_strategy(kind).save_checkpoint is TrainerSaving.save_checkpoint
    with pytest.raises(ArgumentError, match="plugins=dict: such a plugin writes a format"):
        holdfast_strategy(kind)().checkpoint_io = {}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (strategy("FSDPStrategy"), "FSDPStrategy is not supported; use ModelParallelStrategy"),
        (strategy("DeepSpeedStrategy", base=strategy("DDPStrategy")), "holdfast convert"),
        (strategy("XLAStrategy"), "use one of SingleDeviceStrategy"),
        (strategy("FSDPStrategy", "lightning.pytorch.strategies.fsdp"), "configure_model"),
        (dict, r"\(dict\): give a class of lightning.fabric.strategies or lightning.pytorch"),
        ("ddp", r"\('ddp'\): give a class .*holdfast\[lightning\]"),
    ],
)
def test_others_are_refused(kind: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        holdfast_strategy(kind)


def test_a_state_goes_and_comes_without_fabric(tmp_path: Path) -> None:
    saving = HoldfastSaving()
    model = torch.nn.Linear(2, 2)
    state = {"model": model, "more": {"lr": 0.5}, "step": 3, "random": random_states(CPU)}
    saving.save_checkpoint(tmp_path / "a", state)
    wanted = torch.rand(3)
    other: dict[str, Any] = {"model": torch.nn.Linear(2, 2), "step": 0}
    other["random"] = random_states(CPU)
    assert saving.load_checkpoint(tmp_path / "a", other) == {"more": {"lr": 0.5}}
    assert torch.equal(other["model"].weight, model.weight)
    assert other["step"] == 3
    assert torch.equal(torch.rand(3), wanted)


def test_entries_are_compared_unless_strict_is_off(tmp_path: Path) -> None:
    saving = HoldfastSaving()
    saving.save_checkpoint(tmp_path / "step-1", {"nets": {"a": torch.nn.Linear(2, 2)}})
    narrow: dict[str, Any] = {"nets": {"a": torch.nn.Linear(2, 2, bias=False)}}
    with pytest.raises(MismatchError, match=r"nets\.a\.bias"):
        saving.load_checkpoint(tmp_path, narrow)
    saving.load_checkpoint(tmp_path, narrow, strict=False)
    with pytest.raises(MismatchError, match="epoch"):
        saving.load_checkpoint(tmp_path, {"epoch": 1})


@pytest.mark.parametrize("how", [{"filter": {"model": bool}}, {"storage_options": {"a": 1}}])
def test_arguments_without_a_meaning_are_refused(how: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"fabric.save.{next(iter(how))}=.* not supported"):
        HoldfastSaving().save_checkpoint(tmp_path / "step-1", {}, **how)


def test_a_load_needs_a_state_to_fill(tmp_path: Path) -> None:
    for state in (None, {}, torch.nn.Linear(2, 2)):
        with pytest.raises(ArgumentError, match=r"give the state to fill.*holdfast.open"):
            HoldfastSaving().load_checkpoint(tmp_path, state)


def test_a_new_rank_draws_numbers_of_its_own() -> None:
    entry = random_states(CPU)
    assert isinstance(entry, PerRank)
    assert callable(entry.on_resize)
    saved = [entry.value.state_dict()]
    assert entry.on_resize(saved, 0, 2) is saved[0]
    shares = [entry.on_resize(saved, rank, 3) for rank in (1, 2)]
    assert shares[0] != shares[1]
    entry.value.load_state_dict(shares[0])
    first = torch.rand(2)
    entry.value.load_state_dict(shares[0])
    assert torch.equal(torch.rand(2), first)
