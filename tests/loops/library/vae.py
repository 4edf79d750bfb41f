"""A variational autoencoder"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.2  # other noise
DATA = torch.rand(40, 12, generator=torch.Generator().manual_seed(0))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x):
        mean, logvar = self.encode(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (logvar / 2).exp()
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        out = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="none")
        return out.sum(1).mean() + kl


def plain():
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = model(x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
