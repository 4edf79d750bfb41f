"""A small mixture of experts, divided among the ranks along the axis ``ep``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast.elastic.groups.alltoall import all_to_all
from holdfast.elastic.loop.run import Run

TOKENS = 48
WIDTH, HIDDEN, EXPERTS, CHOSEN = 16, 12, 4, 2


class Experts(nn.Module):
    """Two layers for each expert, one expert after the other; this rank's after `spread`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def spread(self, axis: DeviceMesh) -> None:
        """Keep this rank's experts alone."""
        for name, parameter in list(self.named_parameters()):
            cut = distribute_tensor(parameter.detach(), axis, [Shard(0)])
            setattr(self, name, nn.Parameter(cut))

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the rows' values: ``counts[i]`` rows are the i-th expert's, in that order."""
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = zip(rows.split(counts), up.unbind(), down.unbind(), strict=True)
        return torch.cat([torch.tanh(part @ u) @ d for part, u, d in parts])


class Mixture(nn.Module):
    """Sends every token to the experts it scores highest with, wherever they are, and back."""

    def __init__(self, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.dropout, self.experts = nn.Dropout(dropout), Experts()
        self.axis: DeviceMesh | None = None

    def spread(self, axis: DeviceMesh) -> None:
        """Have the ranks of an axis have the experts between them."""
        self.axis = axis
        self.experts.spread(axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, -2)
        scores, chosen = self.router(rows).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        sent = rows.repeat_interleave(CHOSEN, dim=0)[order]
        values = self._through(sent, counts)[order.argsort()]
        found = (values.view(-1, CHOSEN, WIDTH) * scores.unsqueeze(-1)).sum(1)
        return x + self.dropout(found.view_as(x))

    def _through(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return what the experts make of rows that are sorted by expert, in the same order."""
        axis = self.axis
        assert axis is not None
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=axis.get_group())
        send = counts.view(axis.size(), -1).sum(1).tolist()
        mine = received.view(axis.size(), -1)
        receive = mine.sum(1).tolist()
        here = all_to_all(rows, send=send, receive=receive, axis=axis)
        whose = torch.arange(mine.shape[1]).repeat(axis.size()).repeat_interleave(received)
        by_expert = whose.argsort(stable=True)
        values = self.experts(here[by_expert], mine.sum(0).tolist())
        return all_to_all(values[by_expert.argsort()], send=receive, receive=send, axis=axis)


class Net(nn.Module):
    """Guesses the next token, through two mixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Mixture(), Mixture()])
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, ((text + 1) % TOKENS).flatten())


def build(run: Run) -> nn.Module:
    """Spread the experts over ``ep``; every rank has all of the rest."""
    model = Net()
    for block in model.blocks:
        assert isinstance(block, Mixture)
        block.spread(run.mesh["ep"])
    return model


def build_sharded(run: Run) -> nn.Module:
    """Spread the experts, and shard them over those with the same; shard the rest over all."""
    model = build(run)
    replicates = "replicate" in (run.mesh.mesh_dim_names or ())
    copies = run.mesh["replicate", "edp"] if replicates else run.mesh["edp"]
    for block in model.blocks:
        assert isinstance(block, Mixture)
        fully_shard(block.experts, mesh=copies)
        fully_shard(block, mesh=run.data_mesh)
    fully_shard(model, mesh=run.data_mesh)
    return model
