"""Curriculum: the hard samples join step by step"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
X = X[X.norm(dim=1).argsort()]  # the easy ones first
Y = X.sum(1, keepdim=True)
STAGES, EACH = (16, 32, 48), 2


def stage(number):
    return torch.utils.data.TensorDataset(X[: STAGES[number]], Y[: STAGES[number]])


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    for number in range(len(STAGES)):
        for i, (x, y) in enumerate(shuffled(stage(number), batch=8, steps=EACH * (number + 1))):
            if i < EACH * number:
                continue
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(step, loss.item())
            step += 1


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(EACH * len(STAGES)):
        for x, y in run.microbatches(stage(step // EACH)):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
