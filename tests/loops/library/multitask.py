"""Several tasks, weighted by learned uncertainties that belong to no module"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True), (X[:, 0] > 0).long())


def build():
    body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    heads = nn.ModuleDict({"value": nn.Linear(16, 1), "kind": nn.Linear(16, 2)})
    return body, heads, nn.ParameterList([torch.zeros(2)])


def multitask_loss(body, heads, scales, x, y, kind):
    h = body(x)
    losses = F.mse_loss(heads["value"](h), y), F.cross_entropy(heads["kind"](h), kind)
    return (torch.exp(-scales[0]) * torch.stack(losses) + scales[0]).sum()


def plain():
    body, heads, scales = build()
    everything = nn.ModuleList([body, heads, scales])
    optimizer = torch.optim.Adamax(everything.parameters(), lr=1e-2)
    for step, (x, y, kind) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = multitask_loss(body, heads, scales, x, y, kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    body, heads, scales = build()
    everything = nn.ModuleList([body, heads, scales])
    optimizer = torch.optim.Adamax(everything.parameters(), lr=1e-2)
    run.track(model=everything, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y, kind in run.microbatches(DATA):
            loss = multitask_loss(body, heads, scales, x, y, kind)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
