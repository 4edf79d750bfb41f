"""A batch size and a sequence length that grow"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

TEXT = torch.randint(0, 12, (48, 17), generator=torch.Generator().manual_seed(0))
NOISE = 0.5  # the second loader begins with samples of its own


def build():
    return nn.Sequential(nn.Embedding(12, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 12))


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    for batch, length in ((8, 8), (16, 16)):
        for text in shuffled(TEXT, batch=batch, steps=3):
            text = text[:, : length + 1]
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item())
            step += 1


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    small, large = run.loader(TEXT, batch=8, name="small"), run.loader(TEXT, batch=16, name="large")
    for step in run.steps(6):
        loader, length = (small, 8) if step < 3 else (large, 16)
        for text in run.microbatches(loader):
            text = text[:, : length + 1]
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
