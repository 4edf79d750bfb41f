"""A lottery ticket: weights below a threshold are set to zero and held there"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


@torch.no_grad()
def prune(model, masks, share):
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        mask.copy_(weight.abs() > weight.abs().quantile(share))


@torch.no_grad()
def apply(model, masks):
    for name, mask in masks.items():
        model.get_parameter(name).mul_(mask)


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    masks = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.ndim > 1}
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=6)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (2, 4):
            prune(model, masks, share=0.1 * step)
        apply(model, masks)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    masks = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.ndim > 1}
    run.track(model=model, optimizer=optimizer, masks=masks)
    for step in run.steps(6):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        if step in (2, 4):
            prune(model, masks, share=0.1 * step)
        apply(model, masks)
