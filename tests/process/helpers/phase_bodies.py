"""Training bodies for `ranks`: several passes in a step, and other uses of autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_bodies import run_of
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from holdfast.ckpt.state.hashing import state_hash
from holdfast.elastic.config import Batch, Exact, Settings
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.groups import reform
from holdfast.elastic.loop.run import Run

DATA = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


class Pair:
    """Two networks with an optimizer each, in training by ``run``."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 1)
        self.of_body = torch.optim.AdamW(self.body.parameters(), 1e-2)
        self.of_head = torch.optim.AdamW(self.head.parameters(), 1e-2)
        self.run = run
        run.track(**self.state())
        self.loader: Loader = run.loader(DATA)

    def state(self) -> dict[str, Any]:
        """Return what is tracked."""
        return {"A": self.body, "B": self.head, "oA": self.of_body, "oB": self.of_head}


def adversarial(pair: Pair, step: int) -> None:
    """Train a critic on three batches with a gradient penalty, and a generator."""
    run, critic = pair.run, pair.head
    for turn in range(3):
        for number, x in enumerate(run.microbatches(pair.loader, fresh=turn > 0)):
            assert number < run.share
            fake = pair.body(torch.randn(4, 4)).detach()
            mix = torch.lerp(x, fake, torch.rand(4, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            run.backward(critic(fake).mean() - critic(x).mean() + penalty)
        run.step(pair.of_head)
    for _ in run.microbatches(pair.loader):
        run.backward(-critic(pair.body(torch.randn(4, 4))).mean())
    run.step(pair.of_body)


def meta(pair: Pair, step: int) -> None:
    """Adapt in an inner loop of `torch.autograd.grad`, and differentiate through it."""
    run, body = pair.run, pair.body
    for x in run.microbatches(DATA):
        fast = dict(body.named_parameters())
        for _ in range(2):
            loss = (functional_call(body, fast, (x,)) - x).square().mean()
            found = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), found, strict=True)}
        adapted = (functional_call(body, fast, (x,)) - x).square().mean()
        run.backward(adapted + pair.head(x).square().mean())
    run.step(pair.of_body, pair.of_head)


def per_sample(pair: Pair, step: int) -> None:
    """Penalize the gradients of single samples, by `torch.func`."""
    run, body = pair.run, pair.body

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (functional_call(body, parameters, (x,)) - x).square().mean()

    for x in run.microbatches(DATA):
        found = vmap(grad(loss), (None, 0))(dict(body.named_parameters()), x)
        penalty = torch.stack([each.square().sum() for each in found.values()]).sum()
        run.backward(penalty + pair.head(x).square().mean())
    run.step(pair.of_body, pair.of_head)


def _checkpointed(pair: Pair, *, reentrant: bool) -> None:
    run = pair.run
    for x in run.microbatches(DATA):
        hidden = checkpoint(pair.body, x.requires_grad_(), use_reentrant=reentrant)
        run.backward(pair.head(hidden).square().mean())
    run.step(pair.of_body, pair.of_head)


def in_turn(pair: Pair, step: int) -> None:
    """Train one network and freeze the other, in turn."""
    run, of_body = pair.run, step % 2 == 0
    pair.body.requires_grad_(of_body)
    pair.head.requires_grad_(not of_body)
    for x in run.microbatches(DATA):
        run.backward(pair.head(pair.body(x)).square().mean())
    run.step(pair.of_body if of_body else pair.of_head)


def in_turn_inside(pair: Pair, step: int) -> None:
    """Freeze one network inside the pass of the other, as a GAN's loop does in each iteration."""
    run = pair.run
    for x in run.microbatches(DATA):
        pair.head.requires_grad_(True)
        run.backward(pair.head(pair.body(x).detach()).square().mean())
    run.step(pair.of_head)
    for x in run.microbatches(DATA):
        pair.head.requires_grad_(False)
        run.log(**({"first": x.sum()} if run.microbatch == 0 else {}))
        run.backward(pair.head(pair.body(x)).mean())
    run.step(pair.of_body)
    assert run.metrics["first"]


def hooked(pair: Pair, step: int) -> None:
    """Clip the gradient of each microbatch in a hook that is made after `track`."""
    handles = [
        p.register_hook(lambda gradient: gradient.clamp(-0.0371, 0.0371))
        for p in pair.body.parameters()
    ]
    run = pair.run
    for x in run.microbatches(DATA):
        run.backward(pair.head(pair.body(x)).square().mean())
    for handle in handles:
        handle.remove()
    run.step(pair.of_body, pair.of_head)


def some(pair: Pair, step: int) -> None:
    """Leave one network without a gradient in every other microbatch."""
    run = pair.run
    for x in run.microbatches(DATA):
        hidden = x if run.microbatch % 2 else pair.body(x)
        run.backward(pair.head(hidden).square().mean())
    run.step(pair.of_body, pair.of_head)


def twice(pair: Pair, step: int) -> None:
    """See the microbatches without gradients first, with the same noise."""
    run = pair.run
    kept = {}
    for x in run.microbatches(DATA):
        with torch.no_grad():
            kept[run.microbatch] = pair.body(x + torch.randn_like(x))
    for x in run.microbatches(DATA):
        hidden = pair.body(x + torch.randn_like(x))
        assert torch.equal(kept[run.microbatch], hidden.detach())
        run.backward(hidden.square().mean())
    run.step(pair.of_body)


LOOPS: dict[str, Callable[[Pair, int], None]] = {
    "adversarial": adversarial,
    "meta": meta,
    "per sample": per_sample,
    "checkpointed": lambda pair, step: _checkpointed(pair, reentrant=False),
    "checkpointed, reentrant": lambda pair, step: _checkpointed(pair, reentrant=True),
    "in turn": in_turn,
    "in turn, inside": in_turn_inside,
    "hooked": hooked,
    "some": some,
    "twice": twice,
}


def train_all(
    world: reform.GenerationWorld, folder: Path, *, ways: tuple[Exact, ...]
) -> dict[str, str]:
    """Train every loop for some steps; return the hash of its state."""
    found = {}
    for name, body in LOOPS.items():
        for exact in ways:
            settings = Settings(batch=Batch(microbatches=4, size=4), exact=exact, seed=3)
            run, _ = run_of(world, settings)
            pair = Pair(run)
            for step in run.steps(4):
                body(pair, step)
            run._finish()
            found[f"{name} {exact}"] = state_hash(pair.state())
            run._close()
    return found
