"""A vector-quantised autoencoder with a straight-through estimate"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x):
        z = self.encode(x)
        q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        commitment = F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())
        return F.mse_loss(self.decode(z + (q - z).detach()), x) + commitment


def plain():
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for x in run.microbatches(DATA):
            loss = model(x)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
