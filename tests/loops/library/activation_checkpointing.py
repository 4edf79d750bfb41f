"""Activation checkpointing of both kinds, with dropout inside"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import holdfast

NOISE = 0.3  # other dropout
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(8, 16)
        self.first = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        x = self.begin(x)
        x = checkpoint(self.first, x, use_reentrant=False)
        x = checkpoint(self.second, x, use_reentrant=True)
        return self.out(x)


def plain():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
