"""Training by `fit` on ranks that kill themselves, and by Lightning's own Trainer beside it.

    python lightning_fit_job.py FOLDER --die PLACE:STEP ...   leaves end.json in the folder

The places are in hooks, in a save and in a logger. The first rank that comes there dies,
once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import holdfast
from holdfast.adapters.lightning import fit

SIZE, MICROBATCHES = 3, 4


class Deaths:
    """The places where a rank kills itself, once each, as words ``PLACE:STEP``."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._folder, self._words = folder, words

    def at(self, place: str, step: int) -> None:
        """Die here if it is said so."""
        if f"{place}:{step}" in self._words:
            with contextlib.suppress(FileExistsError):
                (self._folder / f"died-{place}-{step}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


class Net(LightningModule):
    """A net with dropout and BatchNorm whose hooks count, log and remember."""

    def __init__(self, deaths: Deaths, *, noisy: bool, sharded: bool) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="deaths")
        self.deaths, self.sharded = deaths, sharded
        middle = [torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3)] if noisy else []
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.Linear(16, 1))
        self.mean = MeanMetric()
        self.steps, self.least = 0, {"loss": float("inf")}
        self.found: list[torch.Tensor] = []

    def configure_model(self) -> None:
        """Shard the layers."""
        if self.sharded:
            fully_shard(self.layers, mesh=self.device_mesh)

    def _loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def _dies(self, place: str) -> None:
        self.deaths.at(place, self.global_step)

    def training_step(self, batch: Any, _: int) -> dict[str, Any]:
        """Return the loss, and log it in several ways."""
        loss = self._loss(batch)
        self._dies("step")
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"twice": 2 * loss, "largest": loss}, reduce_fx="max")
        return {"loss": loss, "more": 1}

    def on_before_optimizer_step(self, _: Any) -> None:
        """Log the norm of the mean gradient."""
        norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]
        if not self.sharded:
            self.log("norm", torch.stack(norms).norm())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        """Count and remember."""
        self.steps += 1
        self.least["loss"] = min(self.least["loss"], float(outputs["loss"]))

    def on_train_epoch_start(self) -> None:
        """Die between epochs."""
        self._dies("epoch")

    def on_train_epoch_end(self) -> None:
        """Log a counter."""
        self.log("steps", float(self.steps))

    def validation_step(self, batch: Any, _: int) -> None:
        """Log the loss by a metric, and collect it."""
        loss = self._loss(batch)
        if not self.trainer.sanity_checking:
            self._dies("validation")
        self.mean(loss)
        self.log("val", self.mean)
        self.found.append(loss + torch.rand(()) * 1e-9)

    def on_validation_epoch_end(self) -> None:
        """Log the spread of what was collected."""
        self.log("val_spread", torch.stack(self.found).std())
        self.found.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Die in a save."""
        self._dies("save")

    def configure_optimizers(self) -> Any:
        """Return the optimizer and a schedule that follows the validation."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class OtherNet(Net):
    """The same with a schedule by steps, and two sets to validate on."""

    def validation_step(self, batch: Any, _: int, dataloader_idx: int = 0) -> None:
        """Log the loss of each set, on steps too."""
        self.log("val", self._loss(batch), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        """Log nothing more."""

    def configure_optimizers(self) -> Any:
        """Return an optimizer and a schedule over the whole training."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Data(LightningDataModule):
    """Rows for training and validation."""

    def __init__(self, size: int, *, shuffle: bool, sets: int = 1) -> None:
        super().__init__()
        self._size, self._shuffle, self._sets = size, shuffle, sets

    def prepare_data(self) -> None:
        """Note that it is called."""
        Path("prepared").touch()

    def setup(self, stage: str) -> None:
        """Make the rows."""
        draw = torch.Generator().manual_seed(0)
        self._rows = [TensorDataset(torch.randn(n, 8, generator=draw)) for n in (44, 10)]

    def train_dataloader(self) -> Any:
        """Return microbatches."""
        return DataLoader(self._rows[0], batch_size=self._size, shuffle=self._shuffle)

    def val_dataloader(self) -> Any:
        """Return batches, in another order each time."""
        made = [DataLoader(self._rows[1], batch_size=4, shuffle=self._shuffle)] * self._sets
        return made[0] if self._sets == 1 else made


class Counts(Callback):
    """Counts validations in a state of its own."""

    def __init__(self) -> None:
        self.validations = 0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Count one."""
        self.validations += not trainer.sanity_checking

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the count."""
        self.validations = state_dict["validations"]


class DyingTable(CSVLogger):
    """A table after whose writes a rank may die, before anyone knows that they are there."""

    deaths: Deaths

    def save(self) -> None:
        """Write."""
        shown = [each["step"] for each in self.experiment.metrics]
        super().save()
        for step in shown:
            self.deaths.at("log", step)


def callbacks(sharded: bool = False) -> list[Any]:
    """Return all that are supported and take part in decisions."""
    return [
        Counts(),
        LearningRateMonitor(),
        EarlyStopping("val", patience=1, min_delta=0.3),
        ModelCheckpoint(
            "saves",
            filename="{epoch}-{step}",
            monitor="val",
            save_top_k=2,
            save_last=True,
            save_weights_only=sharded,
        ),
    ]


def other_callbacks() -> list[Any]:
    """Return others, which save by steps."""
    return [LearningRateMonitor("step"), ModelCheckpoint("saves", every_n_train_steps=5)]


def options(epochs: int) -> dict[str, Any]:
    """Return the same arguments for `fit` and for Lightning's Trainer."""
    return {
        "max_epochs": epochs,
        "val_check_interval": 0.5,
        "log_every_n_steps": 2,
        "gradient_clip_val": 0.5,
    }


def other_options(epochs: int) -> dict[str, Any]:
    """Return others: bfloat16, clipping by value, validation of a part every two epochs."""
    return {
        "max_epochs": epochs,
        "max_steps": 4 * epochs - 1,
        "check_val_every_n_epoch": 2,
        "limit_val_batches": 2,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 3,
        "gradient_clip_val": 0.1,
        "gradient_clip_algorithm": "value",
        "precision": "bf16-mixed",
    }


def digest(value: Any) -> str:
    """Return a digest of a tree of tensors and plain values."""
    if isinstance(value, torch.Tensor):
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        return sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return repr(sorted([digest(key), digest(each)] for key, each in value.items()))
    if isinstance(value, list | tuple):
        return repr([digest(each) for each in value])
    return repr(value).replace(str(Path.cwd()), "")


def saves() -> dict[str, str]:
    """Return a digest of each file of a ModelCheckpoint."""
    found = {}
    for each in sorted(Path("saves").iterdir()):
        content = torch.load(each, weights_only=False)
        found[each.name] = sha256(digest(content).encode()).hexdigest()
    return found


def points() -> list[Any]:
    """Return the points of TensorBoard, of all files."""
    found = []
    for file in Path("board").rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found += [[tag, each.step, each.value] for each in events.Scalars(tag)]
    return sorted(found)


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--checkpoint")
    return parser.parse_args()


def main() -> None:
    """Train in the folder."""
    given = arguments()
    torch.set_num_threads(1)
    given.folder.mkdir(exist_ok=True)
    os.chdir(given.folder)
    if given.compare:
        for other in (False, True):
            compare(given.epochs, other=other)
        return
    deaths = DyingTable.deaths = Deaths(given.folder, given.die)
    checkpoint = holdfast.Checkpoints(given.checkpoint, every=3) if given.checkpoint else None

    @holdfast.resilient(
        batch=holdfast.Batch(microbatches=MICROBATCHES),
        exact="float32",
        snapshots=holdfast.Snapshots(parity=0),
        checkpoint=checkpoint,
    )
    def train(run: holdfast.Run) -> None:
        net = Net(deaths, noisy=not given.sharded, sharded=given.sharded)
        counts, *others = callbacks(given.sharded)
        trainer = fit(
            run,
            net,
            Data(SIZE, shuffle=True),
            callbacks=[counts, *others],
            loggers=[DyingTable(".", name="table"), TensorBoardLogger(".", name="board")],
            **options(given.epochs),
        )
        weights = digest(net.state_dict())
        if run.is_leader:
            tell(trainer, sha256(weights.encode()).hexdigest(), counts.validations)

    train()


def tell(trainer: Any, weights: str, validations: int) -> None:
    """Write all that must not depend on ranks and deaths."""
    net = trainer.lightning_module
    told = {
        "weights": weights,
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "counts": [net.steps, net.least, validations],
        "best": trainer.checkpoint_callback.best_model_path.rpartition("/")[2],
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "saves": saves(),
        "points": points(),
        "table": [each.read_text() for each in Path("table").rglob("metrics.csv")],
    }
    if not net.sharded:
        again = Net.load_from_checkpoint("saves/last.ckpt", deaths=net.deaths)
        told["loaded"] = [again.global_step, digest(again.state_dict())]
    Path("end.json").write_text(json.dumps(told))


def compare(epochs: int, *, other: bool) -> None:
    """Train by `fit` and by Lightning's own Trainer, without dropout, on the same batches."""
    folder = Path("other" if other else "one")
    folder.mkdir()
    kind, sets = (OtherNet, 2) if other else (Net, 1)
    made = other_callbacks if other else callbacks
    how = (other_options if other else options)(epochs)

    @holdfast.resilient(
        batch=holdfast.Batch(microbatches=MICROBATCHES), snapshots=holdfast.Snapshots(parity=0)
    )
    def train(run: holdfast.Run) -> None:
        net = kind(Deaths(Path(), []), noisy=False, sharded=False)
        torch.save(net.state_dict(), folder / "first.pt")
        data = Data(SIZE, shuffle=False, sets=sets)
        logger = CSVLogger(folder, name="ours", version="run")
        fit(run, net, data, callbacks=made(), loggers=[logger], **how)

    train()
    Path("saves").rename(folder / "our-saves")
    net = kind(Deaths(Path(), []), noisy=False, sharded=False)
    net.load_state_dict(torch.load(folder / "first.pt"))
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=made(),
        logger=CSVLogger(folder, name="theirs", version="run"),
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )
    trainer.fit(net, datamodule=Data(SIZE * MICROBATCHES, shuffle=False, sets=sets))
    Path("saves").rename(folder / "their-saves")


if __name__ == "__main__":
    main()
