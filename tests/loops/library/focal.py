"""Rare classes: a weighted sampler, a focal loss and label smoothing"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler

import holdfast

NOISE = 1.0  # other samples
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
LABELS = (torch.arange(40) % 5 == 0).long()
DATA = torch.utils.data.TensorDataset(X, LABELS)
WEIGHTS = (1.0 / LABELS.bincount().float())[LABELS].tolist()


def focal(out, y, gamma=2.0):
    each = F.cross_entropy(out, y, reduction="none", label_smoothing=0.1)
    return ((1 - torch.exp(-each)) ** gamma * each).mean()


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    loader = DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler(WEIGHTS, 40))
    for step, (x, y) in enumerate(loader):
        loss = focal(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(DATA, batch=8, order=holdfast.Weighted(WEIGHTS, count=40, replacement=True))
    for _ in run.epochs(1, loader):
        for x, y in run.microbatches(loader):
            loss = focal(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
