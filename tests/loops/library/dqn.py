"""DQN: a replay buffer, a target network, exploration that fades"""

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 1.0  # other draws


class Replay:
    def __init__(self, size):
        self.seen, self.after = torch.zeros(size, 4), torch.zeros(size, 4)
        self.action, self.reward = torch.zeros(size, dtype=torch.long), torch.zeros(size)
        self.count = torch.zeros((), dtype=torch.long)

    def add(self, seen, action, reward, after):
        i = int(self.count) % len(self.seen)
        self.seen[i], self.action[i], self.reward[i], self.after[i] = seen, action, reward, after
        self.count += 1

    def sample(self, count):
        i = torch.randint(0, min(int(self.count), len(self.seen)), (count,))
        return self.seen[i], self.action[i], self.reward[i], self.after[i]

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def build():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def act(q, env, replay, step):
    for _ in range(8):
        seen = env.clone()
        explores = torch.rand(()) < max(0.1, 1 - step / 5)
        with torch.no_grad():
            action = torch.randint(2, ()) if explores else q(seen).argmax()
        env.mul_(0.9).add_(torch.randn(4) * 0.1 + (action - 0.5) * 0.2)
        replay.add(seen, action, env[0], env)


def td_loss(q, target, batch):
    seen, action, reward, after = batch
    with torch.no_grad():
        wanted = reward + 0.9 * target(after).max(1).values
    return F.smooth_l1_loss(q(seen).gather(1, action[:, None]).squeeze(1), wanted)


def plain():
    q, target = build(), build()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-2)
    replay, env = Replay(64), torch.zeros(4)
    for step in range(6):
        act(q, env, replay, step)
        loss = td_loss(q, target, replay.sample(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 1:
            target.load_state_dict(q.state_dict())
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    q, target = build(), build()
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-2)
    replay, env = Replay(64), torch.zeros(4)
    run.track(q=q, target=target, optimizer=optimizer, replay=replay, env=env)
    for step in run.steps(6):
        run.fence()
        act(q, env, replay, step)
        for _ in run.microbatches():
            loss = td_loss(q, target, replay.sample(4))
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        if step % 2 == 1:
            target.load_state_dict(q.state_dict())
