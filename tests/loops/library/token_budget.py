"""Training until a number of tokens, which only the data tells"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

G = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, 9, (40,), generator=G)
TEXT = torch.randint(1, 16, (40, 9), generator=G) * (torch.arange(9) < LENGTHS[:, None])
BUDGET = 250


def build():
    return nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def lm_loss(model, text):
    wanted = text[:, 1:]
    each = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), wanted, reduction="none")
    kept = wanted != 0
    return ((each * kept).sum(1) / kept.sum(1)).mean(), int(kept.sum())


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = 0
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=100)):
        loss, count = lm_loss(model, text)
        tokens += count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
        if tokens >= BUDGET:
            break


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor(0)
    run.track(model=model, optimizer=optimizer, tokens=tokens)
    for _ in run.steps(100):
        counts = []
        for text in run.microbatches(TEXT):
            loss, count = lm_loss(model, text)
            counts.append(count)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        tokens += run.reduce(counts, "sum")
        if tokens >= BUDGET:
            run.stop()
