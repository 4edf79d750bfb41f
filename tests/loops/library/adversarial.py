"""Adversarial training: the gradient of the input makes the sample harder"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, (X.sum(1) > 0).long())


def attack(model, x, y, epsilon=0.1):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return (x + epsilon * gradient.sign()).detach()


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.cross_entropy(model(attack(model, x, y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.cross_entropy(model(attack(model, x, y)), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
