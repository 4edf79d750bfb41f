"""Averaged weights whose batch statistics `update_bn` computes anew at every evaluation"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.square().mean(1, keepdim=True))


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def plain():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model)
    total = 0.0
    for i, (x, y) in enumerate(shuffled(DATA, batch=4, steps=24)):
        loss = F.mse_loss(model(x), y) / 4
        loss.backward()
        total += loss.item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            swa.update_parameters(model)
            if (i + 1) % 8 == 0:
                update_bn(DataLoader(DATA, batch_size=20), swa)
            print(i // 4, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=4), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swa = AveragedModel(model)
    run.track(model=model, optimizer=optimizer, swa=swa)
    for step in run.steps(6):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        swa.update_parameters(model)
        if step % 2 == 1:
            update_bn(DataLoader(DATA, batch_size=20), swa)
