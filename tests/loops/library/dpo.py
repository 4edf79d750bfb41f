"""Preferences (DPO) against a frozen reference model"""

import copy

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

PAIRS = torch.randint(0, 16, (40, 2, 6), generator=torch.Generator().manual_seed(0))


def logprob(model, text):
    found = model(text[:, :-1]).log_softmax(-1)
    return found.gather(2, text[:, 1:, None]).squeeze(2).sum(1)


def dpo_loss(policy, reference, pairs, beta=0.1):
    chosen, rejected = pairs[:, 0], pairs[:, 1]
    with torch.no_grad():
        before = logprob(reference, chosen) - logprob(reference, rejected)
    now = logprob(policy, chosen) - logprob(policy, rejected)
    return -F.logsigmoid(beta * (now - before)).mean()


def plain():
    policy = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step, pairs in enumerate(shuffled(PAIRS, batch=8, steps=5)):
        loss = dpo_loss(policy, reference, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    policy = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    run.track(policy=policy, optimizer=optimizer)
    for _ in run.steps(5):
        for pairs in run.microbatches(PAIRS):
            loss = dpo_loss(policy, reference, pairs)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
