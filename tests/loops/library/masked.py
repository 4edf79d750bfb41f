"""A masked language model in float64, with the mask drawn in the loop"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other masks
TEXT = torch.randint(1, 16, (40, 8), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(
        nn.Embedding(16, 8), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 128)
    ).double()


def mask(text):
    hidden = torch.rand(text.shape) < 0.3
    hidden[:, 0] = True
    return text.masked_fill(hidden, 0), text.masked_fill(~hidden, -100)


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        given, wanted = mask(text)
        loss = F.cross_entropy(model(given).view(-1, 16), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for text in run.microbatches(TEXT):
            given, wanted = mask(text)
            loss = F.cross_entropy(model(given).view(-1, 16), wanted.flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
