"""Self-distillation (BYOL): the target network is a running average by hand"""

import copy

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.5  # other augmentations
DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def byol_loss(online, predictor, target, x):
    a, b = augment(x), augment(x)
    with torch.no_grad():
        wanted = F.normalize(target(b), dim=1)
    return (2 - 2 * (F.normalize(predictor(online(a)), dim=1) * wanted).sum(1)).mean()


@torch.no_grad()
def update(target, online, decay=0.9):
    for t, o in zip(target.parameters(), online.parameters(), strict=True):
        t.mul_(decay).add_(o, alpha=1 - decay)


def plain():
    online = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    predictor = nn.Linear(8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-2)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = byol_loss(online, predictor, target, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(target, online)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    online = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    predictor = nn.Linear(8, 8)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-2)
    run.track(online=online, predictor=predictor, target=target, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = byol_loss(online, predictor, target, x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        update(target, online)
