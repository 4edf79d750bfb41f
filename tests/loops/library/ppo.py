"""PPO: a rollout per step, then epochs of minibatches over it"""

import torch
from torch import nn
from torch.distributions import Categorical

import holdfast

NOISE = 1.0  # other episodes
ENVS, LENGTH, EPOCHS, MINIBATCHES = 8, 8, 2, 2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, state, action):
        chosen = Categorical(logits=self.actor(state))
        return chosen.log_prob(action), chosen.entropy(), self.critic(state).squeeze(-1)


@torch.no_grad()
def rollout(agent, env):
    found = []
    for _ in range(LENGTH):
        state = env.clone()
        action = Categorical(logits=agent.actor(state)).sample()
        logprob, _, value = agent(state, action)
        env.mul_(0.9).add_(0.1 * torch.randn(ENVS, 3) + 0.2 * (action - 0.5)[:, None])
        found.append((state, action, logprob, value, -env.square().mean(1)))
    states, actions, logprobs, values, rewards = map(torch.stack, zip(*found, strict=True))
    returns, total = torch.zeros_like(rewards), torch.zeros(ENVS)
    for t in reversed(range(LENGTH)):
        total = returns[t] = rewards[t] + 0.95 * total
    return [x.flatten(0, 1) for x in (states, actions, logprobs, returns - values, returns)]


def ppo_loss(agent, states, actions, before, advantages, returns):
    logprobs, entropy, values = agent(states, actions)
    ratio = (logprobs - before).exp()
    clipped = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -clipped.mean() + 0.5 * (values - returns).square().mean() - 0.01 * entropy.mean()


def plain():
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    env = torch.zeros(ENVS, 3)
    for step in range(4):
        data = rollout(agent, env)
        for _ in range(EPOCHS):
            for index in torch.randperm(ENVS * LENGTH).chunk(MINIBATCHES):
                loss = ppo_loss(agent, *(x[index] for x in data))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    env = torch.zeros(ENVS, 3)
    run.track(agent=agent, optimizer=optimizer, env=env)
    for _ in run.steps(4):
        run.fence()
        data = rollout(agent, env)
        for _ in range(EPOCHS):
            for index in torch.randperm(ENVS * LENGTH).chunk(MINIBATCHES):
                parts = index.chunk(4)
                for i in run.microbatches():
                    loss = ppo_loss(agent, *(x[parts[i]] for x in data))
                    run.backward(loss)
                    run.log(loss=loss)
                run.clip_grad_norm_(agent.parameters(), 0.5)
                run.step(optimizer)
