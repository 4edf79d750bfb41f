"""Loops with collectives of their own, and with values collected between passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loading_bodies import TextStream
from rank_bodies import run_of
from ranks import enter
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run
from holdfast.elastic.membership.records import MeshSize

MICROBATCHES = 5
DATA = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))


@contextmanager
def a_run(world: reform.GenerationWorld, **settings: Any) -> Iterator[tuple[Run, Any, Any]]:
    """Return a run with a model of six inputs and its optimizer, tracked."""
    run, _ = run_of(world, Settings(batch=Batch(microbatches=MICROBATCHES, size=2), **settings))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    yield run, model, optimizer
    run._close()


def in_a_microbatch(call: Callable[[Run, torch.Tensor], Any]) -> Callable[..., str]:
    """Return a body that calls ``call`` in the first microbatch and returns the refusal."""

    def body(world: reform.GenerationWorld) -> str:
        with a_run(world) as (run, model, _):
            try:
                for _ in run.steps(1):
                    for x in run.microbatches(DATA):
                        call(run, model(x))
            except ConfigError as refused:
                return str(refused)
        return "nothing was refused"

    return body


def _gather(run: Run, y: torch.Tensor) -> None:
    dist.all_gather([torch.empty_like(y) for _ in range(run.world_size)], y.detach())


def _differentiable(run: Run, y: torch.Tensor) -> None:
    import torch.distributed.nn.functional as differentiable

    differentiable.all_gather(y)


def _functional(run: Run, y: torch.Tensor) -> None:
    from torch.distributed import _functional_collectives as functional

    functional.all_reduce(y, "sum", dist.group.WORLD)


def _in_a_hook(run: Run, y: torch.Tensor) -> None:
    def add(gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)

    y.register_hook(add)
    run.backward(y.sum())


def _as_a_hook(run: Run, y: torch.Tensor) -> None:
    y.register_hook(dist.all_reduce)
    run.backward(y.sum())


def _untracked_ddp(run: Run, y: torch.Tensor) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    run.backward(ddp(y).sum())


def _own_group(run: Run, y: torch.Tensor) -> None:
    dist.all_reduce(y.detach(), group=dist.new_group())


CALLS: dict[str, Callable[[Run, torch.Tensor], Any]] = {
    "dist.all_gather": _gather,
    "all_gather": _differentiable,
    "all_reduce": _functional,
    "dist.all_reduce (hook)": _in_a_hook,
    "dist.all_reduce (as a hook)": _as_a_hook,
    "dist.all_reduce (own group)": _own_group,
    "dist.all_reduce": lambda run, y: dist.all_reduce(y.detach(), async_op=True),
    "dist.all_reduce (axis)": lambda run, y: dist.all_reduce(
        y.detach(), group=run.mesh["dp"].get_group()
    ),
    "dist.barrier": lambda run, y: dist.barrier(),
    "dist.broadcast": lambda run, y: dist.broadcast(y.detach(), src=0),
    "dist.all_gather_object": lambda run, y: dist.all_gather_object([None] * run.world_size, 1),
    "run.gather": lambda run, y: run.gather([y]),
    "run.reduce": lambda run, y: run.reduce([1.0], "sum"),
}


OF_ALL_RANKS = ("dist.all_reduce", "dist.barrier", "dist.broadcast", "all_reduce")
"""Calls on the default group."""


def refusals(world: reform.GenerationWorld, _folder: Path) -> dict[str, str]:
    """Return what every call says inside a microbatch."""
    return {name: in_a_microbatch(call)(world) for name, call in CALLS.items()}


def averaged_by_itself(world: reform.GenerationWorld, _folder: Path) -> str:
    """Return what the backward of a module in an untracked DDP says."""
    return in_a_microbatch(_untracked_ddp)(world)


def collected(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Return the bits of values collected in every way, and what wrong calls say."""
    special = torch.tensor([-0.0, float("nan"), float("inf"), 1e-42])
    kept: dict[str, list[torch.Tensor]] = {}
    numbers, wrong = [], {}
    with a_run(world) as (run, model, optimizer):
        for _ in run.steps(1):
            for x in run.microbatches(DATA):
                m = run.microbatch
                numbers.append(m)
                for name, value in {
                    "float32": torch.cat([special, x.flatten()]),
                    "bfloat16": x.to(torch.bfloat16)[:, :3],
                    "int8": torch.full((3,), m - 2, dtype=torch.int8),
                    "bool": torch.tensor(m % 2 == 0),
                    "complex64": torch.complex(x, -x),
                    "negative zero": torch.tensor(-0.0),
                }.items():
                    kept.setdefault(name, []).append(value)
                run.backward(model(x).square().mean())
            found = {name: run.gather(values) for name, values in kept.items()}
            grown = [value.float().requires_grad_() for value in kept["float32"]]
            assert run.gather(grown).is_leaf and not run.gather(grown).requires_grad
            reduced: dict[str, Any] = {
                how: run.reduce([x[4:] for x in kept["float32"]], how)  # type: ignore[arg-type]
                for how in ("sum", "mean", "max", "min")
            }
            reduced["tokens"] = run.reduce([10**17 + m for m in numbers], "sum")
            reduced["loss"] = run.reduce([0.1 * m for m in numbers], "mean").hex()
            for name, call in {
                "too few": lambda: run.gather(kept["int8"][1:]),
                "a word": lambda: run.reduce(numbers, "median"),  # type: ignore[arg-type]
                "integers": lambda: run.reduce(kept["int8"], "mean"),
                "texts": lambda: run.reduce(["a"] * len(numbers), "sum"),  # type: ignore[type-var]
                "shapes": lambda: run.gather([torch.zeros(m + 1) for m in numbers]),
            }.items():
                try:
                    call()
                except ConfigError as refused:
                    wrong[name] = str(refused)
            run.step(optimizer)
        run._finish()
    return {
        "shapes": {name: list(value.shape) for name, value in found.items()},
        "bits": {n: v.contiguous().view(-1).view(torch.uint8).tolist() for n, v in found.items()},
        "reduced": {k: v.tolist() if torch.is_tensor(v) else v for k, v in reduced.items()},
        "wrong": {name: text for name, text in wrong.items() if name != "too few"},
        "too few": wrong["too few"],
        "numbers": numbers,
    }


def contrastive(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Train with a loss over all samples of a step, in two passes."""
    with a_run(world, exact="float32", seed=5) as (run, model, optimizer):
        for _ in run.steps(4):
            kept: list[torch.Tensor] = []
            with torch.no_grad():
                for x in run.microbatches(DATA):
                    kept.append(views(model, x))
            z = run.gather(kept).requires_grad_()
            loss = contrast(z)
            (g,) = torch.autograd.grad(loss, z)
            for x in run.microbatches(DATA):
                run.backward((views(model, x) * g[run.microbatch]).sum() * MICROBATCHES)
            run.log(loss=loss)
            run.step(optimizer)
        run._finish()
        digest = state_hash({"model": model, "optimizer": optimizer})
        return {"hash": digest, "loss": run.metrics["loss"]}


def views(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of two augmented views: ``[2, samples, dim]``."""
    first, second = (x + 0.1 * torch.randn_like(x) for _ in range(2))
    return nn.functional.normalize(torch.stack([model(first), model(second)]), dim=-1)


def contrast(z: torch.Tensor) -> torch.Tensor:
    """Return the loss that tells every sample's two views from all others."""
    a, b = z.transpose(0, 1).flatten(1, 2)
    return nn.functional.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))


def at_the_end_of_a_stream(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Collect values of a stream whose shards end at different times."""
    run, _ = run_of(world, Settings(batch=Batch(microbatches=7, size=1), seed=7))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TextStream())
    rows, sums, said = [], [], ""
    for _ in run.epochs(1, loader):
        kept = []
        for batch in run.microbatches(loader):
            kept.append(batch.sum())
            run.backward(model(batch.sum().float().view(1, 1)).sum())
        try:
            run.gather(kept)
        except ConfigError as refused:
            said = str(refused)
        rows.append(run.gather(kept, fill=-1).tolist())
        sums.append(run.reduce([int(value) for value in kept], "sum"))
        run.step(optimizer)
    run._finish()
    run._close()
    return {"rows": rows, "sums": sums, "said": said}


def same_script(rank: int, stores: list[str], folder: Path) -> dict[str, Any]:
    """Run one script in a world of two: first the axis ``tp`` spans it, then ``dp`` does.

    Return by mesh the sum that a microbatch finds along ``tp``, and the refusals of collectives.
    """
    found: dict[str, Any] = {}
    for number, size in enumerate((MeshSize(dp=1, tp=2), MeshSize(dp=2)), start=1):
        world = enter(rank, stores, folder, number=number, mesh=size, axes=("dp", "tp"))
        sums = []
        with a_run(world, exact="float32") as (run, model, optimizer):
            for _ in run.steps(1):
                for x in run.microbatches(DATA):
                    mine = torch.ones(1) + run.mesh["tp"].get_local_rank()
                    dist.all_reduce(mine, group=run.mesh["tp"].get_group())
                    sums.append(float(mine))
                    run.backward((mine * model(x)).square().mean())
                run.step(optimizer)
            run._finish()
        refused = {name: in_a_microbatch(CALLS[name])(world) for name in OF_ALL_RANKS}
        found[size.text] = {"sums": sums, "refused": refused}
        world.barrier()
        reform.leave()
    return found


def everything(world: reform.GenerationWorld, folder: Path) -> dict[str, Any]:
    """Run all bodies in the same processes."""
    bodies = (refusals, averaged_by_itself, collected, contrastive, at_the_end_of_a_stream, drawn)
    return {body.__name__: body(world, folder) for body in bodies}


def drawn(world: reform.GenerationWorld, _folder: Path) -> dict[str, Any]:
    """Return what generators of the run's draw at every place, in the order of microbatches."""
    found: dict[str, Any] = {"around": []}
    with a_run(world, seed=3) as (run, model, optimizer):
        noise, other = run.generator("noise"), run.generator()
        assert run.generator("noise") is noise
        for _ in run.steps(2):
            found["around"].append(torch.rand(2, generator=noise).tolist())
            kept = []
            for x in run.microbatches(DATA):
                kept.append(torch.rand(2, generator=noise) - torch.rand(2, generator=other))
                run.backward(model(x).sum())
            found.setdefault("inside", []).extend(run.gather(kept).tolist())
            found["around"].append(torch.rand(2, generator=noise).tolist())
            run.step(optimizer)
        run._finish()
    return found
