"""Tabular data in NumPy arrays, with embeddings of categories"""

import numpy as np
import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

RNG = np.random.default_rng(0)
NUMBERS = RNG.standard_normal((40, 6)).astype(np.float32)
NUMBERS = (NUMBERS - NUMBERS.mean(0)) / NUMBERS.std(0)
CATEGORIES = RNG.integers(0, 5, (40, 2))
TARGET = (NUMBERS[:, 0] + CATEGORIES[:, 0] > 2).astype(np.float32)


class Table(torch.utils.data.Dataset):
    def __len__(self):
        return len(TARGET)

    def __getitem__(self, i):
        return NUMBERS[i], CATEGORIES[i], TARGET[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(5, 4) for _ in range(2))
        self.body = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers, categories):
        found = [embed(categories[:, i]) for i, embed in enumerate(self.embed)]
        return self.body(torch.cat([numbers, *found], dim=1)).squeeze(1)


def plain():
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for step, (numbers, categories, y) in enumerate(shuffled(Table(), batch=8, steps=5)):
        loss = F.binary_cross_entropy_with_logits(model(numbers, categories), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for numbers, categories, y in run.microbatches(Table()):
            loss = F.binary_cross_entropy_with_logits(model(numbers, categories), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
