"""Mixed precision in bfloat16, without a scaler"""

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
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        loss = F.mse_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
