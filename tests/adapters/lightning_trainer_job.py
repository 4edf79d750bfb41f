"""Training with Lightning's Trainer in Holdfast's format, on ranks that kill themselves.

python lightning_trainer_job.py FOLDER    prints a report of all runs as JSON
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_job import run, shard
from torch.utils.data import DataLoader, TensorDataset

from holdfast.adapters.lightning import holdfast_strategy
from holdfast.ckpt import CkptError

EPOCHS = 4


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """A run; with ``die_at`` its ranks kill themselves as the epoch of that number begins."""

    root: str
    sharded: bool = False
    noisy: bool = True
    die_at: int | None = None


class Net(LightningModule):
    """A net with dropout, a schedule, and a logged loss."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        middle = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)] if noisy else []
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.Linear(16, 1))

    def configure_model(self) -> None:
        """Shard the layers, if the strategy has a mesh for it."""
        if self.device_mesh is not None:
            shard(self.layers, self.device_mesh)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss."""
        (x,) = batch
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        return self.training_step(batch, index)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


class Dies(Callback):
    """Kills the process as an epoch begins, and notes where the run began."""

    def __init__(self, die_at: int | None) -> None:
        self._die_at, self.begun_at = die_at, -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the first epoch; die in the planned one."""
        if self.begun_at < 0:
            self.begun_at = trainer.current_epoch
        if trainer.current_epoch == self._die_at:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(plan: TrainerPlan, ranks: int) -> dict[str, Any]:
    """Fit until the last epoch, from the last checkpoint on."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made: Any = (
        holdfast_strategy(ModelParallelStrategy)(data_parallel_size=ranks, tensor_parallel_size=1)
        if plan.sharded
        else holdfast_strategy(DDPStrategy)()
    )
    seed_everything(3, verbose=False)
    dies, root = Dies(plan.die_at), Path(plan.root)
    keeps = ModelCheckpoint(root, filename="{epoch}", save_last=True, save_top_k=2, monitor="loss")
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=made,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[keeps, dies],
    )
    net = Net(plan.noisy)
    rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(rows), batch_size=12 // ranks, shuffle=plan.noisy)
    last = root / "last.ckpt"
    trainer.fit(net, loader, ckpt_path=last if last.exists() else None)
    parts = [p.full_tensor() if plan.sharded else p for p in net.parameters()]
    weights = torch.cat([each.detach().double().flatten() for each in parts]).tolist()
    return {
        "begun_at": dies.begun_at,
        "step": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "kept": sorted(each.name for each in root.iterdir()),
        "weights": weights,
        "hash": sha256(repr(weights).encode()).hexdigest(),
    }


class Changes(Callback):
    """Puts other weights into the checkpoint, as callbacks that average weights do."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: Any) -> None:
        """Replace one tensor."""
        checkpoint["state_dict"]["layers.0.bias"] = torch.zeros(16)


def refused(folder: Path) -> dict[str, str]:
    """Return the messages of what is refused, and the loss of a validation that is not."""
    rows = DataLoader(TensorDataset(torch.zeros(8, 8)), batch_size=2)

    def trainer(*callbacks: Callback, **how: Any) -> Trainer:
        return Trainer(
            accelerator="cpu",
            devices=1,
            strategy=holdfast_strategy(DDPStrategy)(),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[*callbacks],
            **how,
        )

    inside = folder / "inside.ckpt"
    first = trainer(max_steps=2)
    first.fit(Net(False), rows)
    first.save_checkpoint(inside)
    trainer().validate(Net(False), rows, ckpt_path=inside, verbose=False)
    changed = trainer(Changes(), max_epochs=1)
    changed.fit(Net(False), rows)
    calls: dict[str, Callable[[], object]] = {
        "inside": lambda: trainer(max_epochs=2).fit(Net(False), rows, ckpt_path=inside),
        "store": lambda: first.save_checkpoint("s3://bucket/a.ckpt"),
        "changed": lambda: changed.save_checkpoint(folder / "changed.ckpt"),
        "plugin": lambda: trainer(plugins=[AsyncCheckpointIO()]),
    }
    found: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except CkptError as error:
            found[name] = str(error)
    first.save_checkpoint(inside, weights_only=True)
    trainer().validate(Net(False), rows, ckpt_path=inside, verbose=False)
    return found


def main(folder: Path) -> None:
    """Run everything and print the report."""
    torch.optim.SGD([torch.zeros(1)])  # imports what each rank would import
    report: dict[str, Any] = {}
    for name, sharded, noisy in (("ddp", False, True), ("fsdp2", True, False)):
        plan = TrainerPlan(root=str(folder / name), sharded=sharded, noisy=noisy)
        whole = replace(plan, root=str(folder / f"{name}-whole"))
        report[f"{name} whole"] = run(whole, ranks=2, body=trained)
        report[f"{name} killed"] = run(replace(plan, die_at=2), ranks=2, body=trained)
        shutil.copytree(plan.root, f"{plan.root}-alone")
        report[f"{name} again"] = run(plan, ranks=2, body=trained)
    alone = TrainerPlan(root=str(folder / "fsdp2-alone"), noisy=False)
    report["alone"] = run(alone, ranks=1, body=trained)
    report["refused"] = refused(folder)
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
