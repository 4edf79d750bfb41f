"""Contrastive learning with the negatives of the microbatch"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other augmentations
DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def nt_xent(a, b, temperature=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(-1e9)
    return F.cross_entropy(similar, (torch.arange(len(z)) + len(a)) % len(z))


def augment(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = 0.0
    for i, x in enumerate(shuffled(DATA, batch=4, steps=20)):
        loss = nt_xent(model(augment(x)), model(augment(x))) / 4
        loss.backward()
        total += loss.item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(i // 4, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=4), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = nt_xent(model(augment(x)), model(augment(x)))
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
