"""Evolution strategies: no backward pass through the model, a population per step"""

import torch
from torch import nn

import holdfast

NOISE = 0.5  # another population
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
POPULATION, SIGMA = 8, 0.1


def fitness(model, noise):
    found = nn.utils.parameters_to_vector(model.parameters()) + SIGMA * noise
    weights = dict(zip([n for n, _ in model.named_parameters()], split(model, found), strict=True))
    return -(torch.func.functional_call(model, weights, X) - Y).square().mean()


def split(model, vector):
    sizes = [p.numel() for p in model.parameters()]
    parts = vector.split(sizes)
    return [v.view_as(p) for v, p in zip(parts, model.parameters(), strict=True)]


def plain():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    size = sum(p.numel() for p in model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(POPULATION):
            noise = torch.randn(size)
            with torch.no_grad():
                up, down = fitness(model, noise), fitness(model, -noise)
            for p, e in zip(model.parameters(), split(model, noise), strict=True):
                estimate = -(up - down) / (2 * SIGMA) * e / POPULATION
                p.grad = estimate if p.grad is None else p.grad + estimate
            total -= (up + down).item() / (2 * POPULATION)
        optimizer.step()
        print(step, total)


@holdfast.resilient(batch=holdfast.Batch(microbatches=8), exact="float32", checkpoint="runs")
def port(run):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    size = sum(p.numel() for p in model.parameters())
    for _ in run.steps(5):
        for _ in run.microbatches():
            noise = torch.randn(size)
            with torch.no_grad():
                up, down = fitness(model, noise), fitness(model, -noise)
            estimate = -(up - down) / (2 * SIGMA) * noise
            run.backward((nn.utils.parameters_to_vector(model.parameters()) * estimate).sum())
            run.log(loss=-(up + down) / 2)
        run.step(optimizer)
