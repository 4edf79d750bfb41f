"""Parameters sharded by FSDP2"""

import torch
from ordinary import shuffled
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    fully_shard(model, mesh=run.data_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer)
