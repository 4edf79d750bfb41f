"""MAML: the gradient through the inner loop"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import holdfast

X = torch.linspace(-2, 2, 10)[:, None]


def task(number):
    g = torch.Generator().manual_seed(number)
    phase, height = torch.rand(2, generator=g)
    return height * torch.sin(X + 3 * phase)


def maml_loss(model, y, steps=2):
    fast = dict(model.named_parameters())
    for _ in range(steps):
        inner = F.mse_loss(functional_call(model, fast, X[::2]), y[::2])
        grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
        fast = {n: p - 0.05 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
    return F.mse_loss(functional_call(model, fast, X[1::2]), y[1::2])


def plain():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(5):
        loss = torch.stack([maml_loss(model, task(4 * step + i)) for i in range(4)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(5):
        for i in run.microbatches():
            loss = maml_loss(model, task(4 * step + i))
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
