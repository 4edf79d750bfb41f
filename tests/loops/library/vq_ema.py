"""A codebook that follows the encoder by running averages, without a gradient"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("counts", torch.ones(6))

    def forward(self, x):
        z = self.encode(x)
        chosen = F.one_hot(torch.cdist(z, self.codes).argmin(1), 6).float()
        q = chosen @ self.codes
        loss = F.mse_loss(self.decode(z + (q - z).detach()), x) + 0.25 * F.mse_loss(z, q)
        return loss, chosen.sum(0), (chosen.T @ z).detach()

    @torch.no_grad()
    def follow(self, counts, sums, decay=0.9):
        totals = decay * self.codes * self.counts[:, None] + (1 - decay) * sums
        self.counts.mul_(decay).add_((1 - decay) * counts)
        self.codes.copy_(totals / self.counts[:, None])


def plain():
    model = VQ()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss, counts, sums = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow(counts, sums)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = VQ()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        all_counts, all_sums = [], []
        for x in run.microbatches(DATA):
            loss, counts, sums = model(x)
            all_counts.append(counts)
            all_sums.append(sums)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        model.follow(run.reduce(all_counts, "sum"), run.reduce(all_sums, "sum"))
