"""Metric learning: triplets with the hardest ones of the microbatch"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, torch.arange(48) % 3)


def hard_triplets(z, y, margin=0.5):
    distance = torch.cdist(z, z)
    same = y[:, None] == y[None, :]
    positive = distance.masked_fill(~same, -1.0).max(1).values
    negative = distance.masked_fill(same, 1e6).min(1).values
    return F.relu(positive - negative + margin).mean()


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = 0.0
    for i, (x, y) in enumerate(shuffled(DATA, batch=6, steps=20)):
        loss = hard_triplets(model(x), y) / 4
        loss.backward()
        total += loss.item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(i // 4, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=6), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = hard_triplets(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
