"""Soft actor-critic: critics, actor and temperature, one after the other on the same samples"""

import copy

import torch
from ordinary import shuffled
from torch import nn
from torch.distributions import Normal
from torch.nn import functional as F

import holdfast

NOISE = 1.0  # other actions
G = torch.Generator().manual_seed(0)
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 3, generator=G),
    torch.randn(40, 1, generator=G).tanh(),
    torch.randn(40, 1, generator=G),
    torch.randn(40, 3, generator=G),
)


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def act(actor, seen):
    mean, scale = actor(seen).chunk(2, dim=1)
    chosen = Normal(mean, scale.clamp(-2, 2).exp())
    raw = chosen.rsample()
    logprob = chosen.log_prob(raw) - 2 * (0.6931 - raw - F.softplus(-2 * raw))
    return raw.tanh(), logprob


def critic_loss(critic, target, actor, alpha, seen, action, reward, after):
    with torch.no_grad():
        then, logprob = act(actor, after)
        value = target(torch.cat([after, then], 1)).amin(1, keepdim=True)
        wanted = reward + 0.9 * (value - alpha.exp() * logprob)
    return F.mse_loss(critic(torch.cat([seen, action], 1)), wanted.expand(-1, 2))


def actor_loss(critic, actor, alpha, seen):
    action, logprob = act(actor, seen)
    value = critic(torch.cat([seen, action], 1)).amin(1, keepdim=True)
    return (alpha.exp().detach() * logprob - value).mean(), logprob.detach()


@torch.no_grad()
def follow(target, critic, tau=0.05):
    for t, c in zip(target.parameters(), critic.parameters(), strict=True):
        t.lerp_(c, tau)


def plain():
    critic, actor = mlp(4, 2), mlp(3, 2)
    target = copy.deepcopy(critic).requires_grad_(False)
    alpha = nn.ParameterList([torch.zeros(())])
    critic_adam = torch.optim.Adam(critic.parameters(), lr=3e-3)
    actor_adam = torch.optim.Adam(actor.parameters(), lr=3e-3)
    alpha_adam = torch.optim.Adam(alpha.parameters(), lr=3e-3)
    for step, (seen, action, reward, after) in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss = critic_loss(critic, target, actor, alpha[0], seen, action, reward, after)
        critic_adam.zero_grad()
        loss.backward()
        critic_adam.step()
        policy, logprob = actor_loss(critic, actor, alpha[0], seen)
        actor_adam.zero_grad()
        policy.backward()
        actor_adam.step()
        alpha_adam.zero_grad()
        (-alpha[0].exp() * (logprob - 1).mean()).backward()
        alpha_adam.step()
        follow(target, critic)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    critic, actor = mlp(4, 2), mlp(3, 2)
    target = copy.deepcopy(critic).requires_grad_(False)
    alpha = nn.ParameterList([torch.zeros(())])
    critic_adam = torch.optim.Adam(critic.parameters(), lr=3e-3)
    actor_adam = torch.optim.Adam(actor.parameters(), lr=3e-3)
    alpha_adam = torch.optim.Adam(alpha.parameters(), lr=3e-3)
    run.track(
        critic=critic,
        actor=actor,
        target=target,
        alpha=alpha,
        critic_adam=critic_adam,
        actor_adam=actor_adam,
        alpha_adam=alpha_adam,
    )
    for _ in run.steps(5):
        for seen, action, reward, after in run.microbatches(DATA):
            loss = critic_loss(critic, target, actor, alpha[0], seen, action, reward, after)
            run.backward(loss)
            run.log(loss=loss)
        run.step(critic_adam)
        for seen, *_ in run.microbatches(DATA):
            policy, logprob = actor_loss(critic, actor, alpha[0], seen)
            run.backward(policy - alpha[0].exp() * (logprob - 1).mean())
        run.step(actor_adam, alpha_adam)
        follow(target, critic)
