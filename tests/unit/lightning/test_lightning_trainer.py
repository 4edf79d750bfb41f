"""A Trainer's checkpoint goes into a directory of its path, and comes back from there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast import ckpt
from holdfast.adapters.lightning.trainer_saving import TrainerSaving
from holdfast.ckpt import ArgumentError, MismatchError, StateError
from holdfast.ckpt.checkpoints.catalog import committed_steps


class Strategy(TrainerSaving):
    """A strategy as a Trainer uses it, with one optimizer that has a state."""

    def __init__(self, *, bias: bool = True, fn: str = "fit") -> None:
        self.lightning_module = torch.nn.Linear(2, 2, bias=bias)
        self.lightning_module.trainer = SimpleNamespace(state=SimpleNamespace(fn=fn))
        self.optimizers = [torch.optim.AdamW(self.lightning_module.parameters())]
        self.root_device = torch.device("cpu")
        self.lightning_module(torch.ones(1, 2)).sum().backward()
        self.optimizers[0].step()

    def dumped(self, *, step: int = 4, is_last: bool = True, loader: Any = ()) -> dict[str, Any]:
        """Return what ``dump_checkpoint`` makes, as far as it matters here."""
        batches = {"is_last_batch": is_last, "total": {"ready": 2}}
        fit = {"epoch_loop.batch_progress": batches, "state_dict": {}}
        if loader:
            fit["state_dict"] = {"combined_loader": [*loader]}
        return {
            "global_step": step,
            "state_dict": self.lightning_module_state_dict(),
            "optimizer_states": [self.optimizer_state(each) for each in self.optimizers],
            "lr_schedulers": [{"last_epoch": 2}],
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(0.5)}},
            "loops": {"fit_loop": fit},
        }


def test_all_comes_back_into_another_trainer(tmp_path: Path) -> None:
    first, second = Strategy(), Strategy()
    first.save_checkpoint(first.dumped(), tmp_path / "last.ckpt")
    wanted = torch.rand(3)
    found = second.load_checkpoint(tmp_path / "last.ckpt")
    assert found["lr_schedulers"] == [{"last_epoch": 2}]
    assert found["callbacks"]["ModelCheckpoint{'monitor': None}"]["best"] == 0.5
    assert (found["state_dict"], found["optimizer_states"]) == ({}, [])
    second.load_model_state_dict(found)
    assert second.lightning_restore_optimizer
    second.load_optimizer_state_dict(found)
    assert torch.equal(torch.rand(3), wanted)
    assert torch.equal(second.lightning_module.weight, first.lightning_module.weight)
    moments = [
        each.optimizers[0].state[each.lightning_module.weight]["exp_avg"]
        for each in (first, second)
    ]
    assert torch.equal(*moments)


def test_a_path_holds_its_last_checkpoint_alone(tmp_path: Path) -> None:
    strategy = Strategy()
    for step in (3, 7, 5):
        strategy.save_checkpoint(strategy.dumped(step=step), tmp_path / "last.ckpt")
    assert committed_steps(tmp_path / "last.ckpt") == [5]
    strategy.remove_checkpoint(tmp_path / "last.ckpt")
    strategy.remove_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()


def test_weights_alone_have_no_optimizer(tmp_path: Path) -> None:
    strategy = Strategy()
    dumped = strategy.dumped()
    weights = {key: dumped[key] for key in ("global_step", "state_dict", "loops")}
    strategy.save_checkpoint(weights, tmp_path / "a.ckpt")
    assert "optimizer_states" not in strategy.load_checkpoint(tmp_path / "a.ckpt")
    with ckpt.open(tmp_path / "a.ckpt") as opened:
        assert sorted(opened) == ["model.bias", "model.weight"]


def test_other_weights_than_the_modules_are_refused(tmp_path: Path) -> None:
    strategy = Strategy()
    for change in ({"bias": torch.zeros(2)}, {"more": torch.zeros(2)}):
        dumped = strategy.dumped()
        dumped["state_dict"] = {**dumped["state_dict"], **change}
        with pytest.raises(StateError, match=f"changed {next(iter(change))} in checkpoint"):
            strategy.save_checkpoint(dumped, tmp_path / "a.ckpt")


def test_a_fit_from_inside_an_epoch_is_refused_unless_the_loader_keeps_its_place(
    tmp_path: Path,
) -> None:
    strategy, path = Strategy(), tmp_path / "a.ckpt"
    strategy.save_checkpoint(strategy.dumped(is_last=False), path)
    with pytest.raises(StateError, match=r"saved inside an epoch.*every_n_epochs=1"):
        strategy.load_checkpoint(path)
    assert Strategy(fn="validate").load_checkpoint(path)["global_step"] == 4
    strategy.save_checkpoint(strategy.dumped(is_last=False, loader=[{"at": 2}]), path)
    assert strategy.load_checkpoint(path)["global_step"] == 4


def test_another_module_is_refused_unless_loading_is_not_strict(tmp_path: Path) -> None:
    strategy, narrow = Strategy(), Strategy(bias=False)
    strategy.save_checkpoint(strategy.dumped(), tmp_path / "a.ckpt")
    found = narrow.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(MismatchError, match=r"model\.bias"):
        narrow.load_model_state_dict(found)
    narrow.load_model_state_dict(found, strict=False)
    assert torch.equal(narrow.lightning_module.weight, strategy.lightning_module.weight)


def test_a_store_and_options_of_one_are_refused() -> None:
    strategy = Strategy()
    with pytest.raises(ArgumentError, match="a store is not supported with the Trainer yet"):
        strategy.save_checkpoint(strategy.dumped(), "s3://bucket/a.ckpt")
    with pytest.raises(ArgumentError, match="storage_options"):
        strategy.save_checkpoint(strategy.dumped(), "a.ckpt", storage_options={})
