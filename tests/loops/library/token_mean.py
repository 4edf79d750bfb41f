"""A loss that is the mean over the label tokens of the whole batch, in rows of different lengths"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

G = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, 9, (40,), generator=G)
TEXT = torch.randint(1, 16, (40, 9), generator=G) * (torch.arange(9) < LENGTHS[:, None])


def build():
    return nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def labels(text):
    return (text[:, 1:] != 0).sum()


def lm_loss(model, text):
    out = model(text[:, :-1]).transpose(1, 2)
    return F.cross_entropy(out, text[:, 1:], ignore_index=0)


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        loss = lm_loss(model, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for text in run.microbatches(TEXT, weigh=labels):
            loss = lm_loss(model, text)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
