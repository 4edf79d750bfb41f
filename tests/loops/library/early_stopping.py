"""Early stopping by the loss on held-out data, which keeps the best weights"""

import copy

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(56, 8, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
DATA, HELD_OUT = torch.utils.data.TensorDataset(X[:40], Y[:40]), (X[40:], Y[40:])


@torch.no_grad()
def evaluate(model):
    model.eval()
    loss = F.mse_loss(model(HELD_OUT[0]), HELD_OUT[1])
    model.train()
    return loss


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    best = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    least, patience = torch.tensor(float("inf")), torch.tensor(0)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=100)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
        held_out = evaluate(model)
        patience += 1
        if held_out < least:
            least.copy_(held_out)
            patience.zero_()
            best.load_state_dict(model.state_dict())
        if patience >= 3:
            break


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    best = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    least, patience = torch.tensor(float("inf")), torch.tensor(0)
    run.track(model=model, best=best, optimizer=optimizer, least=least, patience=patience)
    for _ in run.steps(100):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        held_out = evaluate(model)
        patience += 1
        if held_out < least:
            least.copy_(held_out)
            patience.zero_()
            best.load_state_dict(model.state_dict())
        if patience >= 3:
            run.stop()
