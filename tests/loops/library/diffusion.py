"""Diffusion with an exponential average; noise and times by the default generator"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast

NOISE = 0.5  # other noise
DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * 0.2 + 1
ALPHAS = torch.cumprod(1 - torch.linspace(1e-4, 0.05, 50), 0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.begin, self.end = nn.Embedding(50, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, t):
        return self.end(F.silu(self.begin(x) + self.time(t)))


def diffusion_loss(model, x):
    t = torch.randint(0, 50, (len(x),))
    noise = torch.randn_like(x)
    a = ALPHAS[t, None]
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def plain():
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = diffusion_loss(model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    run.track(model=model, optimizer=optimizer, ema=ema)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = diffusion_loss(model, x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        ema.update_parameters(model)
