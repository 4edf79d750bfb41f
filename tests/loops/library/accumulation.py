"""Gradient accumulation by hand, which the port no longer needs"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
ACCUMULATE = 4


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = 0.0
    for i, (x, y) in enumerate(shuffled(DATA, batch=2, steps=24)):
        loss = F.mse_loss(model(x), y) / ACCUMULATE
        loss.backward()
        total += loss.item()
        if (i + 1) % ACCUMULATE == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(i // ACCUMULATE, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(6):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer)
