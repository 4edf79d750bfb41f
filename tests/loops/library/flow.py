"""A normalising flow of coupling layers"""

import torch
from ordinary import shuffled
from torch import nn

import holdfast

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    4, 4, generator=torch.Generator().manual_seed(1)
)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        shift, scale = self.net(a).chunk(2, dim=1)
        scale = scale.tanh()
        return torch.cat([b * scale.exp() + shift, a], dim=1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        return 0.5 * x.square().sum(1) - total


def plain():
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = model(x).mean()
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
