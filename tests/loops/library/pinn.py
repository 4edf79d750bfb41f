"""A physics-informed network: derivatives of the output in the loss"""

import torch
from ordinary import shuffled
from torch import nn

import holdfast

POINTS = torch.rand(40, 1, generator=torch.Generator().manual_seed(0))


def residual(model, x):
    x = x.clone().requires_grad_()
    u = model(x)
    du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
    bound = model(torch.zeros(1, 1)).square().sum() + (model(torch.ones(1, 1)) - 1).square().sum()
    return (ddu + u).square().mean() + bound


def plain():
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, x in enumerate(shuffled(POINTS, batch=8, steps=5)):
        optimizer.zero_grad()
        loss = residual(model, x)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(POINTS):
            loss = residual(model, x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
