"""A GAN: discriminator and generator in one step, the generator with noise of its own"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other noise
DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)) * 0.5 + 1


def build():
    generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
    discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return generator, discriminator


def bce(out, value):
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, value))


def plain():
    G, D = build()
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    for step, real in enumerate(shuffled(DATA, batch=8, steps=5)):
        opt_d.zero_grad()
        fake = G(torch.randn(len(real), 3)).detach()
        d_loss = bce(D(real), 1.0) + bce(D(fake), 0.0)
        d_loss.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = bce(D(G(torch.randn(len(real), 3))), 1.0)
        g_loss.backward()
        opt_g.step()
        print(step, d_loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    G, D = build()
    opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.999))
    run.track(G=G, D=D, opt_g=opt_g, opt_d=opt_d)
    for _ in run.steps(5):
        for real in run.microbatches(DATA):
            fake = G(torch.randn(len(real), 3)).detach()
            d_loss = bce(D(real), 1.0) + bce(D(fake), 0.0)
            run.backward(d_loss)
            run.log(loss=d_loss)
        run.step(opt_d)

        for real in run.microbatches(DATA):
            g_loss = bce(D(G(torch.randn(len(real), 3))), 1.0)
            run.backward(g_loss)
        run.step(opt_g)
