"""Reptile: an inner loop on a copy of the model, whose way is the meta-gradient"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.linspace(-2, 2, 10)[:, None]


def task(number):
    g = torch.Generator().manual_seed(number)
    phase, height = torch.rand(2, generator=g)
    return height * torch.sin(X + 3 * phase)


def adapt(model, y, steps=3):
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.05)
    for _ in range(steps):
        loss = F.mse_loss(fast(X), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    return fast, loss


def plain():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        total = 0.0
        for number in range(4):
            fast, loss = adapt(model, task(4 * step + number))
            for p, q in zip(model.parameters(), fast.parameters(), strict=True):
                way = (p - q).detach() / 4
                p.grad = way if p.grad is None else p.grad + way
            total += loss.item() / 4
        optimizer.step()
        print(step, total)


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(5):
        for number in run.microbatches():
            fast, loss = adapt(model, task(4 * step + number))
            pairs = zip(model.parameters(), fast.parameters(), strict=True)
            run.backward(sum((p - q.detach()).square().sum() / 2 for p, q in pairs))
            run.log(loss=loss)
        run.step(optimizer)
