"""Diffusion with noise and times by a generator of its own"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

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


def diffusion_loss(model, x, generator):
    t = torch.randint(0, 50, (len(x),), generator=generator)
    noise = torch.randn(x.shape, generator=generator)
    a = ALPHAS[t, None]
    return F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def plain():
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = diffusion_loss(model, x, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = run.generator("noise")
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = diffusion_loss(model, x, generator)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
