"""A sampler of one's own, which draws its order from a generator: long samples with long ones"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

import holdfast

G = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(3, 9, (40,), generator=G)
TEXT = torch.randint(1, 16, (40, 9), generator=G) * (torch.arange(9) < LENGTHS[:, None])
NOISE = 0.05


class ByLength(Sampler):
    def __init__(self):
        self.generator = torch.Generator()

    def __len__(self):
        return len(TEXT)

    def __iter__(self):
        order = torch.randperm(len(TEXT), generator=self.generator)
        for group in order.split(16):
            yield from group[LENGTHS[group].argsort()].tolist()


def lm_loss(model, text):
    wanted = text[:, 1:]
    each = F.cross_entropy(model(text[:, :-1]).transpose(1, 2), wanted, reduction="none")
    kept = wanted != 0
    return ((each * kept).sum(1) / kept.sum(1)).mean()


def build():
    return nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TEXT, batch_size=8, sampler=ByLength())
    for step, text in enumerate(loader):
        loss = lm_loss(model, text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(TEXT, batch=8, order=ByLength())
    for _ in run.epochs(1, loader):
        for text in run.microbatches(loader):
            loss = lm_loss(model, text)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
