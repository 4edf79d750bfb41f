"""Stochastic weight averaging with its own learning rate, and an exponential average"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.square().mean(1, keepdim=True))


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=6)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        if step >= 3:
            swa.update_parameters(model)
            scheduler.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    run.track(model=model, optimizer=optimizer, swa=swa, ema=ema, scheduler=scheduler)
    for step in run.steps(6):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        ema.update_parameters(model)
        if step >= 3:
            swa.update_parameters(model)
            scheduler.step()
