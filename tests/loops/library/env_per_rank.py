"""Actor and critic on a world of each rank, which goes on from step to step"""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

import holdfast

NOISE = 1.0  # other actions
PER_RANK = True


class World:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.state = torch.zeros(3)

    def act(self, action):
        wind = torch.randn(3, generator=self.generator)
        self.state = 0.9 * self.state + 0.1 * wind + 0.2 * (action - 0.5)
        return -self.state.square().mean()

    def state_dict(self):
        return {"generator": self.generator.get_state(), "state": self.state}

    def load_state_dict(self, saved):
        self.generator.set_state(saved["generator"])
        self.state = saved["state"]


def mlp(out):
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, out))


def losses(actor, critic, world, length=8):
    logprobs, values, rewards = [], [], []
    for _ in range(length):
        chosen = Categorical(logits=actor(world.state))
        action = chosen.sample()
        logprobs.append(chosen.log_prob(action))
        values.append(critic(world.state).squeeze())
        rewards.append(world.act(action))
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.95 * total
        returns.insert(0, total)
    returns, values = torch.stack(returns), torch.stack(values)
    advantage = returns - values.detach()
    return -(torch.stack(logprobs) * advantage).mean(), F.mse_loss(values, returns)


def plain():
    actor, critic = mlp(2), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    world = World(seed=0)
    for step in range(5):
        found = [losses(actor, critic, world) for _ in range(4)]
        actor_loss = torch.stack([a for a, _ in found]).mean()
        critic_loss = torch.stack([c for _, c in found]).mean()
        optimizer.zero_grad()
        (actor_loss + critic_loss).backward()
        optimizer.step()
        print(step, critic_loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), checkpoint="runs")
def port(run):
    actor, critic = mlp(2), mlp(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
    world = World(seed=run.rank)
    run.track(actor=actor, critic=critic, optimizer=optimizer, world=holdfast.PerRank(world))
    for _ in run.steps(5):
        for _ in run.microbatches():
            actor_loss, critic_loss = losses(actor, critic, world)
            run.backward(actor_loss + critic_loss)
            run.log(loss=critic_loss)
        run.step(optimizer)
