"""MoCo: a queue of keys from an encoder that follows slowly"""

import copy

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.3  # other augmentations
DATA = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def moco_loss(query, key, queue, x):
    q = F.normalize(query(augment(x)), dim=1)
    with torch.no_grad():
        k = F.normalize(key(augment(x)), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)), k


@torch.no_grad()
def follow(key, query, momentum=0.9):
    for k, q in zip(key.parameters(), query.parameters(), strict=True):
        k.mul_(momentum).add_(q, alpha=1 - momentum)


def build():
    query = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    return query, key, F.normalize(torch.randn(24, 8), dim=1)


def plain():
    query, key, queue = build()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
    for step, x in enumerate(shuffled(DATA, batch=8, steps=5)):
        loss, keys = moco_loss(query, key, queue, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(key, query)
        queue.copy_(torch.cat([queue[len(keys) :], keys]))
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    query, key, queue = build()
    optimizer = torch.optim.SGD(query.parameters(), lr=0.05, momentum=0.9)
    run.track(query=query, key=key, queue=queue, optimizer=optimizer)
    for _ in run.steps(5):
        mine = []
        for x in run.microbatches(DATA):
            loss, keys = moco_loss(query, key, queue, x)
            mine.append(keys)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        follow(key, query)
        keys = run.gather(mine).flatten(0, 1)
        queue.copy_(torch.cat([queue[len(keys) :], keys]))
