"""Actor and critic with an optimizer each, on episodes of a small world"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

import holdfast

NOISE = 1.0  # other episodes


def mlp(out):
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, out))


def episode(actor, critic, length=8):
    state, logprobs, values, rewards = torch.randn(3), [], [], []
    for _ in range(length):
        chosen = Categorical(logits=actor(state))
        action = chosen.sample()
        logprobs.append(chosen.log_prob(action))
        values.append(critic(state).squeeze())
        state = 0.9 * state + 0.1 * torch.randn(3) + 0.2 * (action - 0.5)
        rewards.append(-state.square().mean())
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.95 * total
        returns.insert(0, total)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = returns - values.detach()
    return -(torch.stack(logprobs) * advantage).mean(), F.mse_loss(values, returns)


def plain():
    actor, critic = mlp(2), mlp(1)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for step in range(5):
        episodes = [episode(actor, critic) for _ in range(4)]
        actor_loss = torch.stack([a for a, _ in episodes]).mean()
        critic_loss = torch.stack([c for _, c in episodes]).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        print(step, critic_loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    actor, critic = mlp(2), mlp(1)
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    run.track(
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
    )
    for _ in run.steps(5):
        for _ in run.microbatches():
            actor_loss, critic_loss = episode(actor, critic)
            run.backward(actor_loss + critic_loss)
            run.log(loss=critic_loss)
        run.step(actor_optimizer, critic_optimizer)
