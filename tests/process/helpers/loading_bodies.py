"""The functions that ranks run in the loader's process tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_bodies import Net, run_of
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.groups import reform

TEXTS = 23


def text(index: int) -> torch.Tensor:
    """Return sample ``index``, with some noise that the sample's own randomness makes."""
    noise = int(torch.randint(50, ()))
    return (torch.arange(8) * 7 + index + noise) % 50


class Texts:
    """A data set that augments at random."""

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> torch.Tensor:
        return text(index)


class TextStream(IterableDataset[torch.Tensor]):
    """The same in shards that end at different times."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        yield from (text(i) for i in range(info.id, TEXTS, info.num_workers))


def train_all(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Train every kind of model on every kind of data set."""
    found: dict[str, Any] = {
        f"{stream=} {sharded=}": train_epochs(world, stream=stream, sharded=sharded)
        for stream in (False, True)
        for sharded in (False, True)
    }
    return found | {"means": mean_of_a_short_step(world)}


def train_epochs(world: reform.GenerationWorld, *, stream: bool, sharded: bool) -> dict[str, Any]:
    """Train two epochs whose last steps are smaller than the world; return what all agree on."""
    settings = Settings(batch=Batch(microbatches=7, size=1), exact="float32", seed=7)
    run, _ = run_of(world, settings)
    torch.manual_seed(1)
    model = Net()
    if sharded:
        fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data: Any = TextStream() if stream else Texts()
    loader = run.loader(data)
    run.track(model=model, optimizer=optimizer)
    losses, epochs = [], []
    for _ in run.epochs(2, loader):
        for batch in run.microbatches(loader):
            loss = model(batch.remainder_(50))  # in place: another pass must not see it
            run.backward(loss)
            run.log(loss=loss, samples=torch.tensor(1.0))
        epochs.append(loader.epoch)
        run.step(optimizer)
        losses.append(run.metrics.get("loss"))
    run._finish()
    digest = state_hash({"model": model, "optimizer": optimizer})
    run._close()
    return {"hash": digest, "losses": losses, "epochs": epochs, "steps": run.completed}


def mean_of_a_short_step(world: reform.GenerationWorld) -> list[float]:
    """Return the gradient of a linear model after each step of an epoch of 7 samples, 5 a step."""
    settings = Settings(batch=Batch(microbatches=4), exact=None, seed=7)
    run, _ = run_of(world, settings)
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    samples = [torch.tensor([2.0**i]) for i in range(7)]
    loader = run.loader(samples, batch=5, shuffle=False)
    run.track(model=model, optimizer=optimizer)
    means = []
    for step in run.steps(len(loader)):
        if step:
            means.append(run.metrics["value"])
        for batch in run.microbatches(loader):
            run.backward(model(batch).mean())
            run.log(value=batch.mean())
        assert model.weight.grad is not None
        means.append(float(model.weight.grad))
        run.step(optimizer)
    run._finish()
    means.append(run.metrics["value"])
    run._close()
    return means
