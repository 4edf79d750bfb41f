"""Fine-tuning: the body is thawed at some step, and its norms stop following the samples"""

import torch
import torch.nn.functional as F
from ordinary import shuffled
from torch import nn

import holdfast

X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


def net():
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
    return nn.Sequential(body.requires_grad_(False), nn.Linear(8, 1))


def plain():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=6)):
        if step == 2:
            model[0].requires_grad_(True)
            model[0].eval()
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        loss = sum(F.mse_loss(model(a), b) for a, b in parts) / 4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(6):
        if step == 2:
            model[0].requires_grad_(True)
            model[0].eval()
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
