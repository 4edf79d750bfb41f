"""A convolutional network with batch normalisation"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

G = torch.Generator().manual_seed(0)
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 3, 6, 6, generator=G), torch.randint(0, 4, (40,), generator=G)
)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)
    )


def plain():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    total = 0.0
    model.train()
    for i, (x, y) in enumerate(shuffled(DATA, batch=4, steps=20)):
        loss = F.cross_entropy(model(x), y) / 4
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
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    model.train()
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
