"""Sharpness-aware minimisation (SAM): up the gradient, then down the one found there"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


class Ascent(torch.optim.Optimizer):
    """Climbs by ``rho``; ``descend`` returns to where it was."""

    def __init__(self, params, rho=0.05):
        super().__init__(params, {"rho": rho})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    ascent = Ascent(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        ascent.step()
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        ascent.descend()
        optimizer.step()
        model.zero_grad()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    ascent = Ascent(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, ascent=ascent, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(ascent)
        for x, y in run.microbatches(DATA):
            run.backward(F.mse_loss(model(x), y))
        ascent.descend()
        run.step(optimizer)
