"""A small GPT in the wrappings of PyTorch: compilers, data parallelism, checkpoints, precision.

``wrapped_training.py WRAPPING BACKEND FILE [kill]`` writes the hash of the final weights into FILE;
``kill`` ends rank 1 in the third step of the first generation.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import holdfast

WRAPPING, BACKEND, FILE, *KILL = sys.argv[1:]
PARTS = set(WRAPPING.split("+"))
WORDS, WIDTH, LENGTH = 17, 16, 8
DATA = torch.randint(0, WORDS, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norms = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, length, width]`` of the same."""
        heads = (
            part.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.norms(x))))


class Gpt(nn.Module):
    """Two blocks between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next words."""
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if "again" in PARTS else block(x)
        return self.head(self.norm(x))


def wrapped(model: Gpt, run: holdfast.Run) -> nn.Module:
    """Wrap ``model`` as the command line says; ``wrapped(model)(words)`` are the logits."""

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=BACKEND)  # type: ignore[return-value]

    def shard(module: nn.Module) -> None:
        fully_shard(module, mesh=run.mesh["dp"])

    if "compile(ddp)" in PARTS:
        return compiled(DistributedDataParallel(model))
    if "ddp(compile)" in PARTS:
        return DistributedDataParallel(compiled(model))
    if "ddp" in PARTS:
        return DistributedDataParallel(model)
    if "ddp(compiled in place)" in PARTS:
        model.compile(backend=BACKEND)
        return DistributedDataParallel(model)
    if "shard(compile(block))" in PARTS:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = compiled(block)
            shard(model.blocks[i])
    elif "compile(shard(block))" in PARTS or "compile(shard)" in PARTS:
        for block in model.blocks:
            shard(block)
            if "compile(shard(block))" in PARTS:
                block.compile(backend=BACKEND)
    elif "compile" in PARTS:
        return compiled(model)
    shard(model)
    return compiled(model) if "compile(shard)" in PARTS else model


def loss_of(net: nn.Module, model: Gpt, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss; by `torch.func` over single samples if the command line says so."""
    words, following = batch[:, :-1], batch[:, 1:]
    if "functional" not in PARTS:
        return F.cross_entropy(net(words).flatten(0, 1).float(), following.flatten())

    def of_one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, dict(model.named_parameters()), x[None])
        return F.cross_entropy(logits[0], y)

    return torch.func.vmap(of_one)(words, following).mean()


@holdfast.resilient(batch=holdfast.Batch(microbatches=4, size=2), exact="float32")
def train(run: holdfast.Run) -> None:
    """Train four steps."""
    torch.set_num_threads(1)
    model, average = Gpt(), None
    if "ema" in PARTS:  # before it is sharded: FSDP2 forbids copies
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    net = wrapped(model, run)
    if average is not None and "shard" in WRAPPING:
        for module in (*average.module.blocks, average.module):
            fully_shard(module, mesh=run.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaler" in PARTS else None
    more = {"average": average, "scaler": scaler}
    run.track(model=net, optimizer=optimizer, **{k: v for k, v in more.items() if v is not None})
    for step in run.steps(4):
        for batch in run.microbatches(DATA):
            if KILL and (step, run.rank, run.generation) == (2, 1, 1):
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled="bfloat16" in PARTS):
                loss = loss_of(net, model, batch)
            run.backward(loss if scaler is None else scaler.scale(loss))
        run.step(optimizer, scaler=scaler)
        if average is not None:
            average.update_parameters(model)
    found = (average or model).state_dict()
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    if run.is_leader:
        Path(FILE).write_text(holdfast.state_hash(whole))


train()
