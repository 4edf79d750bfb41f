"""Loops that take their samples as they should not, or may: each says how it ends, as JSON."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast import elastic

DATA = [torch.full((4,), float(i)) for i in range(32)]
Body = Callable[[holdfast.Run, Any, Any], Iterator[torch.Tensor]]


def cycled(loader: Any) -> Iterator[Any]:
    """Return the batches of a loader without end."""
    while True:
        yield from loader


def next_of_an_own_loader(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    batches = iter(loader)
    for _ in run.steps(3):
        for _ in run.microbatches():
            run.backward(model(next(batches)).sum())
        yield torch.zeros(())


def a_batch_for_each_step(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _, batch in zip(run.steps(3), cycled(loader), strict=False):
        for _ in run.microbatches():
            run.backward(model(batch).sum())
        yield torch.zeros(())


def beside_the_microbatches(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        for (batch,), _ in zip(zip(loader, strict=False), run.microbatches(), strict=False):
            run.backward(model(batch).sum())
        yield torch.zeros(())


def around_the_microbatches(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        for _, batch in zip(run.microbatches(), loader, strict=False):
            run.backward(model(batch).sum())
        yield torch.zeros(())


def an_evaluation_of_each_step(
    run: holdfast.Run, model: Any, loader: Any
) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        for batch in run.microbatches(DATA):
            run.backward(model(batch).sum())
        yield torch.zeros(())
        with run.pause(), torch.no_grad():
            for batch in loader:
                model(batch)
            for batch in itertools.islice(loader, 2):
                model(batch)


def the_first_microbatch_alone(
    run: holdfast.Run, model: Any, loader: Any
) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        run.backward(model(next(iter(run.microbatches(DATA)))).sum())
        yield torch.zeros(())


def one_that_is_held(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        batches = run.microbatches(DATA)
        run.backward(model(next(batches)).sum())
        yield torch.zeros(())


def a_break(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        for number, batch in enumerate(run.microbatches(DATA)):
            run.backward(model(batch).sum())
            if number == 1:
                break
        yield torch.zeros(())


def two_at_once(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    for _ in run.steps(3):
        for a, _ in zip(run.microbatches(DATA), run.microbatches(DATA), strict=False):
            run.backward(model(a).sum())
        yield torch.zeros(())


def divided_by_rank(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    sampler: Any = DistributedSampler(DATA, num_replicas=1, rank=0)  # type: ignore[arg-type]
    run.loader(DataLoader(DATA, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    yield torch.zeros(())


def a_tracked_loader_by_hand(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    own = StatefulDataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
    run.track(model=model, own=own)
    own_batches = iter(own)
    for _ in run.steps(3):
        for _ in run.microbatches():
            run.backward(model(next(own_batches)).sum())
        yield torch.zeros(())


def tracked_generator(run: holdfast.Run, model: Any, loader: Any) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    run.track(model=model, generator=generator)
    for _ in run.steps(3):
        for batch in run.microbatches(DATA):
            run.backward(model(batch + torch.randn(4, generator=generator)).sum())
        yield torch.zeros(())


BODIES: tuple[Body, ...] = (
    next_of_an_own_loader,
    a_batch_for_each_step,
    beside_the_microbatches,
    around_the_microbatches,
    an_evaluation_of_each_step,
    the_first_microbatch_alone,
    one_that_is_held,
    a_break,
    two_at_once,
    divided_by_rank,
    tracked_generator,
    a_tracked_loader_by_hand,
)


def ending(body: Body, kind: Any) -> str:
    """Return the refusal of a loop, or ``completed``."""

    @holdfast.resilient(batch=holdfast.Batch(microbatches=4, size=2), exact="float32")
    def train(run: holdfast.Run) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if body not in (tracked_generator, a_tracked_loader_by_hand):
            run.track(model=model, optimizer=optimizer)
        for _ in body(run, model, kind(DATA, batch_size=4)):
            run.step(optimizer)

    try:
        train()
    except elastic.ConfigError as refused:
        return str(refused)
    return "completed"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {body.__name__: ending(body, DataLoader) for body in BODIES}
    stateful = BODIES[:2]
    found |= {f"{body.__name__}, stateful": ending(body, StatefulDataLoader) for body in stateful}
    print(json.dumps(found))
