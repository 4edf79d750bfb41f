"""Two stages: pre-training, then another head and another optimizer on its weights"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
UNLABELLED, LABELLED = X, torch.utils.data.TensorDataset(X, (X[:, 0] > 0).long())


def encoder():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU())


def classifier():
    model = nn.Sequential(encoder(), nn.Linear(16, 2))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    return model


def plain():
    model = nn.Sequential(encoder(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, x in enumerate(shuffled(UNLABELLED, batch=8, steps=5)):
        loss = F.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())

    weights = model[0].state_dict()
    model = classifier()
    model[0].load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(shuffled(LABELLED, batch=8, steps=5)):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs/pretrain"
)
def pretrain(run):
    model = nn.Sequential(encoder(), nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(UNLABELLED):
            loss = F.mse_loss(model(x), x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs/finetune"
)
def finetune(run):
    model = classifier()
    holdfast.load("runs/pretrain", {"model": model}, select="model.0.*")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(LABELLED):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)


PARTS = (pretrain, finetune)


def port():
    pretrain()
    finetune()
