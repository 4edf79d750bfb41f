"""Parameter groups without and with weight decay, warm-up and cosine"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


def groups(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 5e-3},
    ]


def schedule(optimizer):
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=2)
    cosine = CosineAnnealingLR(optimizer, T_max=4)
    return SequentialLR(optimizer, [warm_up, cosine], milestones=[2])


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = schedule(optimizer)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=6)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    scheduler = schedule(optimizer)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for _ in run.steps(6):
        for x, y in run.microbatches(DATA):
            loss = F.mse_loss(model(x), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        scheduler.step()
