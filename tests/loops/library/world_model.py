"""A world model: recurrent dynamics with sampled latents, reconstruction and reward"""

import torch
from ordinary import shuffled
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other samples of the latents
G = torch.Generator().manual_seed(0)
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 4, 6, generator=G), torch.randn(40, 4, 2, generator=G)
)


class RSSM(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4 + 2, 16)
        self.prior, self.posterior = nn.Linear(16, 8), nn.Linear(16 + 6, 8)
        self.decode, self.reward = nn.Linear(20, 6), nn.Linear(20, 1)

    def forward(self, seen, actions):
        h, z, loss = torch.zeros(len(seen), 16), torch.zeros(len(seen), 4), 0.0
        for t in range(seen.shape[1]):
            h = self.cell(torch.cat([z, actions[:, t]], 1), h)
            mean, scale = self.prior(h).chunk(2, 1)
            prior = Normal(mean, F.softplus(scale) + 0.1)
            mean, scale = self.posterior(torch.cat([h, seen[:, t]], 1)).chunk(2, 1)
            posterior = Normal(mean, F.softplus(scale) + 0.1)
            z = posterior.rsample()
            features = torch.cat([h, z], 1)
            loss = loss + F.mse_loss(self.decode(features), seen[:, t])
            loss = loss + F.mse_loss(self.reward(features), seen[:, t, :1])
            loss = loss + 0.1 * kl_divergence(posterior, prior).sum(1).mean()
        return loss


def plain():
    model = RSSM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (seen, actions) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = model(seen, actions)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = RSSM()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for seen, actions in run.microbatches(DATA):
            loss = model(seen, actions)
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 10.0)
        run.step(optimizer)
