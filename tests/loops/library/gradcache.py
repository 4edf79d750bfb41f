"""Contrastive learning with the negatives of the whole batch (GradCache): two passes"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other augmentations
DATA = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))


def nt_xent(a, b, temperature=0.5):
    z = F.normalize(torch.cat([a, b]), dim=1)
    similar = (z @ z.T / temperature).fill_diagonal_(-1e9)
    return F.cross_entropy(similar, (torch.arange(len(z)) + len(a)) % len(z))


def augment(x):
    return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, x in enumerate(shuffled(DATA, batch=16, steps=5)):
        loss = nt_xent(model(augment(x)), model(augment(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=4), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        found = []
        for x in run.microbatches(DATA):
            with torch.no_grad():
                found.append(torch.stack([model(augment(x)), model(augment(x))]))
        every = run.gather(found).requires_grad_()
        loss = nt_xent(every[:, 0].flatten(0, 1), every[:, 1].flatten(0, 1))
        (gradient,) = torch.autograd.grad(loss, every)
        for x in run.microbatches(DATA):
            mine = torch.stack([model(augment(x)), model(augment(x))])
            run.backward(len(gradient) * (mine * gradient[run.microbatch]).sum())
        run.log(loss=loss)
        run.step(optimizer)
