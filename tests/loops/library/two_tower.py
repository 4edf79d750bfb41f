"""A two-tower recommender; the negatives are the other items of the microbatch"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

G = torch.Generator().manual_seed(0)
DATA = torch.stack([torch.randint(0, 20, (40,), generator=G), torch.randperm(40, generator=G)], 1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.Embedding(40, 8)
        self.user, self.item = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, pairs):
        u = F.normalize(self.user(self.users(pairs[:, 0])), dim=1)
        i = F.normalize(self.item(self.items(pairs[:, 1])), dim=1)
        return F.cross_entropy(u @ i.T / 0.1, torch.arange(len(pairs)))


def plain():
    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = 0.0
    for i, pairs in enumerate(shuffled(DATA, batch=4, steps=20)):
        loss = model(pairs) / 4
        loss.backward()
        total += loss.item()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            print(i // 4, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=4), exact="float32", checkpoint="runs"
)
def port(run):
    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for pairs in run.microbatches(DATA):
            loss = model(pairs)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
