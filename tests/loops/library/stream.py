"""A stream of packed documents, divided among the workers of the loader"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import holdfast

NOISE = 0.2  # documents in another order


class Packed(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        rest = []
        for number in range(first, 64, stride):
            g = torch.Generator().manual_seed(number)
            length = int(torch.randint(3, 12, (), generator=g))
            rest += torch.randint(1, 16, (length,), generator=g).tolist() + [0]
            while len(rest) > 8:
                yield torch.tensor(rest[:9])
                rest = rest[8:]


def build():
    return nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def plain():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, text in enumerate(DataLoader(Packed(), batch_size=8, drop_last=True)):
        if step == 5:
            break
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Packed(), batch=8)
    for _ in run.steps(5):
        for text in run.microbatches(loader):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
