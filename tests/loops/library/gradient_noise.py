"""Noise on the gradients (Neelakantan et al.), and gradients clipped by value"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.2  # other noise
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad += torch.randn_like(p.grad) * 0.01 / (1 + step) ** 0.55
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
        for p in model.parameters():
            p.grad += torch.randn_like(p.grad) * 0.01 / (1 + step) ** 0.55
        run.step(optimizer)
