"""Mixed precision with a GradScaler, unscaled for clipping"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

RTOL = 0.02  # bfloat16
X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))


def plain():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=6)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    run.track(model=model, optimizer=optimizer, scaler=scaler)
    for _ in run.steps(6):
        for x, y in run.microbatches(DATA):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            run.backward(scaler.scale(loss))
            run.log(loss=loss)
        scaler.unscale_(optimizer)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer, scaler=scaler)
