"""Uses of `fit` that are refused: prints the message of each as JSON.

python lightning_fit_refusals.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

import holdfast
from holdfast.adapters.lightning import fit
from holdfast.ckpt.errors import HoldfastError

ROWS = TensorDataset(torch.ones(8, 2))
LOADER = DataLoader(ROWS, batch_size=2)
SETTINGS = {"batch": holdfast.Batch(microbatches=2), "snapshots": holdfast.Snapshots(parity=0)}


class Net(LightningModule):
    """A net whose parts can be replaced."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.mean = torch.nn.Linear(2, 1), MeanMetric()
        self.last: Any = None
        self.parts = parts

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the loss."""
        loss = self.layer(batch[0]).square().mean()
        part = self.parts.get("training_step")
        return loss if part is None else part(self, loss, batch, index)

    def validation_step(self, *_: Any) -> None:
        """Do nothing."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Do what is asked for."""
        if part := self.parts.get("on_train_batch_end"):
            part(self, *args)

    def configure_optimizers(self) -> Any:
        """Return one optimizer, or what is asked for."""
        made = torch.optim.SGD(self.parameters(), lr=0.1)
        part = self.parts.get("configure_optimizers")
        return made if part is None else part(made)


class Manual(Net):
    """A net that steps by itself."""

    automatic_optimization = False


class Endless(IterableDataset[torch.Tensor]):
    """A stream."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(2)


GLOBAL = Net()


def step(part: Callable[..., Any]) -> Net:
    """Return a net with another training_step."""
    return Net(training_step=part)


def after(part: Callable[..., Any]) -> Net:
    """Return a net with another on_train_batch_end."""
    return Net(on_train_batch_end=part)


def keep(net: Net, loss: torch.Tensor, *_: Any) -> torch.Tensor:
    """Keep the loss in an attribute."""
    net.last = loss.detach()
    return loss


def measure(net: Net, loss: torch.Tensor, *_: Any) -> torch.Tensor:
    """Log by a metric."""
    net.mean(loss)
    net.log("mean", net.mean)
    return loss


def differ(net: Net, loss: torch.Tensor, *_: Any) -> torch.Tensor:
    """Log twice."""
    net.log("a", loss)
    net.log("a", loss)
    return loss


def twice(run: holdfast.Run) -> None:
    """Give a net to two calls."""
    net = Net()
    fit(run, net, LOADER, max_steps=0)
    fit(run, net, LOADER, max_steps=0)


Body = Callable[[holdfast.Run], Any]

CASES: dict[str, Body] = {
    "no module": lambda run: fit(run, torch.nn.Linear(2, 1), LOADER),
    "manual": lambda run: fit(run, Manual(), LOADER),
    "global": lambda run: fit(run, GLOBAL, LOADER),
    "twice": twice,
    "optimizers": lambda run: fit(run, Net(configure_optimizers=lambda a: [a, a]), LOADER),
    "no optimizer": lambda run: fit(run, Net(configure_optimizers=lambda _: None), LOADER),
    "stream": lambda run: fit(run, Net(), DataLoader(Endless(), batch_size=2)),
    "loaders": lambda run: fit(run, Net(), {"a": LOADER, "b": LOADER}),
    "drop_last": lambda run: fit(run, Net(), DataLoader(ROWS, batch_size=3, drop_last=True)),
    "no loss": lambda run: fit(run, step(lambda *_: None), LOADER),
    "attribute": lambda run: fit(run, step(keep), LOADER),
    "metric": lambda run: fit(run, step(measure), LOADER),
    "log twice": lambda run: fit(run, step(differ), LOADER),
    "batch": lambda run: fit(run, after(lambda _, __, batch, ___: batch[0]), LOADER),
    "outputs": lambda run: fit(run, after(lambda _, outputs, *__: outputs["x"]), LOADER),
    "experiment": lambda run: fit(
        run,
        after(lambda net, *_: net.logger.experiment.add_image("a", 1)),
        LOADER,
        loggers=[CSVLogger(".")],
    ),
    "trainer": lambda run: fit(
        run, after(lambda net, *_: net.trainer.validate(net, LOADER)), LOADER
    ),
    "object": lambda run: fit(run, after(lambda net, *_: setattr(net, "last", object())), LOADER),
    "skip": lambda run: fit(run, Net(), LOADER, callbacks=[Skips()]),
    "interval": lambda run: fit(run, Net(), LOADER, LOADER, val_check_interval=9),
    "endless": lambda run: fit(run, Net(), LOADER, max_epochs=-1),
}


class Skips(Callback):
    """Reads a batch before it is there."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Read the batch."""
        batch.size()


def main(folder: Path) -> None:
    """Print the messages."""
    os.chdir(folder)
    found: dict[str, str] = {}
    for name, body in CASES.items():
        try:
            holdfast.resilient(**SETTINGS)(body)()  # type: ignore[call-overload]
            found[name] = ""
        except HoldfastError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
