"""Alternating minimisation: one factor frozen while the other is trained"""

import torch
from ordinary import shuffled
from torch import nn

import holdfast

PAIRS = torch.cartesian_prod(torch.arange(6), torch.arange(8))
SCORES = torch.randn(48, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(PAIRS, SCORES)


def factorization_loss(users, items, pairs, score):
    found = (users(pairs[:, 0]) * items(pairs[:, 1])).sum(1)
    return (found - score).square().mean()


def plain():
    users, items = nn.Embedding(6, 4), nn.Embedding(8, 4)
    optimizers = (
        torch.optim.SGD(users.parameters(), lr=0.5),
        torch.optim.SGD(items.parameters(), lr=0.5),
    )
    for step, (pairs, score) in enumerate(shuffled(DATA, batch=8, steps=6)):
        users.requires_grad_(step % 2 == 0)
        items.requires_grad_(step % 2 == 1)
        optimizer = optimizers[step % 2]
        loss = factorization_loss(users, items, pairs, score)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    users, items = nn.Embedding(6, 4), nn.Embedding(8, 4)
    optimizers = (
        torch.optim.SGD(users.parameters(), lr=0.5),
        torch.optim.SGD(items.parameters(), lr=0.5),
    )
    run.track(users=users, items=items, user_sgd=optimizers[0], item_sgd=optimizers[1])
    for step in run.steps(6):
        users.requires_grad_(step % 2 == 0)
        items.requires_grad_(step % 2 == 1)
        optimizer = optimizers[step % 2]
        for pairs, score in run.microbatches(DATA):
            loss = factorization_loss(users, items, pairs, score)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
