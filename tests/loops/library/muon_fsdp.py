"""Muon and AdamW on parameters sharded by FSDP2"""

import torch
from ordinary import shuffled
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import holdfast

RTOL = 0.02  # Muon orthogonalises in bfloat16
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.cumsum(1))


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        muon.step()
        adamw.step()
        model.zero_grad()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    fully_shard(model, mesh=run.data_mesh)
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    adamw = torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2)
    run.track(model=model, muon=muon, adamw=adamw)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(muon, adamw)
