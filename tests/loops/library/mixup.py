"""Image classification with mixup"""

import numpy as np
import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.5  # other random draws
G = torch.Generator().manual_seed(0)
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 3, 6, 6, generator=G), torch.randint(0, 4, (40,), generator=G)
)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


def mixup(x, y, alpha=0.2):
    lam = np.random.beta(alpha, alpha)
    index = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[index], y, y[index], lam


def plain():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        x, a, b, lam = mixup(x, y)
        out = model(x)
        loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            x, a, b, lam = mixup(x, y)
            out = model(x)
            loss = lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
