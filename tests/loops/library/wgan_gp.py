"""WGAN-GP: several steps of the critic on fresh samples, a gradient penalty, then the generator"""

import torch
from ordinary import shuffled
from torch import nn

import holdfast

NOISE = 1.0  # other noise
DATA = torch.randn(48, 4, generator=torch.Generator().manual_seed(0)) * 0.5 + 2
N_CRITIC = 2


def build():
    generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
    return generator, nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def gradient_penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (g,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((g.norm(dim=1) - 1) ** 2).mean()


def plain():
    G, C = build()
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(C.parameters(), lr=1e-3, betas=(0.0, 0.9))
    loader = iter(shuffled(DATA, batch=8, steps=10))
    for step in range(5):
        for _ in range(N_CRITIC):
            real = next(loader)
            fake = G(torch.randn(len(real), 3)).detach()
            c_loss = C(fake).mean() - C(real).mean() + 10 * gradient_penalty(C, real, fake)
            opt_c.zero_grad()
            c_loss.backward()
            opt_c.step()
        g_loss = -C(G(torch.randn(len(real), 3))).mean()
        opt_g.zero_grad()
        g_loss.backward()
        opt_g.step()
        print(step, c_loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    G, C = build()
    opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
    opt_c = torch.optim.Adam(C.parameters(), lr=1e-3, betas=(0.0, 0.9))
    run.track(G=G, C=C, opt_g=opt_g, opt_c=opt_c)
    loader = run.loader(DATA, batch=8)
    for _ in run.steps(5):
        for turn in range(N_CRITIC):
            for real in run.microbatches(loader, fresh=turn > 0):
                fake = G(torch.randn(len(real), 3)).detach()
                c_loss = C(fake).mean() - C(real).mean() + 10 * gradient_penalty(C, real, fake)
                run.backward(c_loss)
                run.log(loss=c_loss)
            run.step(opt_c)
        for real in run.microbatches(loader):
            g_loss = -C(G(torch.randn(len(real), 3))).mean()
            run.backward(g_loss)
        run.step(opt_g)
