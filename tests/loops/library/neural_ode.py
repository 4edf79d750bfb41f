"""A neural ODE, integrated by Runge and Kutta's method"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

START = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
TURN = torch.tensor([[0.9, -0.4], [0.4, 0.9]])
DATA = torch.utils.data.TensorDataset(START, START @ TURN.T)


def integrate(f, y, steps=4):
    h = 1.0 / steps
    for _ in range(steps):
        k1 = f(y)
        k2 = f(y + h / 2 * k1)
        k3 = f(y + h / 2 * k2)
        k4 = f(y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


def plain():
    f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-2)
    for step, (begin, end) in enumerate(shuffled(DATA, batch=8, steps=5)):
        optimizer.zero_grad()
        loss = F.mse_loss(integrate(f, begin), end)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(f.parameters(), lr=1e-2)
    run.track(f=f, optimizer=optimizer)
    for _ in run.steps(5):
        for begin, end in run.microbatches(DATA):
            loss = F.mse_loss(integrate(f, begin), end)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
