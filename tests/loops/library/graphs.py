"""A graph network on batches of graphs of different sizes"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast


class Graphs(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        nodes = 3 + index % 4
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=g)
        return torch.randn(nodes, 8, generator=g), edges, index % 4 / 4


def collate(graphs):
    first = torch.tensor([0, *(len(x) for x, _, _ in graphs)]).cumsum(0)
    x = torch.cat([x for x, _, _ in graphs])
    edges = torch.cat([e + at for (_, e, _), at in zip(graphs, first, strict=False)], dim=1)
    owner = torch.repeat_interleave(torch.arange(len(graphs)), first.diff())
    return x, edges, owner, torch.tensor([[y] for _, _, y in graphs])


class GNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(8, 16), nn.Linear(24, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, x, edges, owner, graphs):
        sent = self.message(x)[edges[0]]
        got = torch.zeros(len(x), 16).index_add(0, edges[1], sent)
        h = torch.relu(self.update(torch.cat([x, got], dim=1)))
        return self.out(torch.zeros(graphs, 16).index_add(0, owner, h))


def plain():
    model = GNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = shuffled(Graphs(), batch=8, steps=5, collate_fn=collate)
    for step, (x, edges, owner, y) in enumerate(loader):
        loss = F.mse_loss(model(x, edges, owner, len(y)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = GNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Graphs(), batch=8, collate_fn=collate)
    for _ in run.epochs(1, loader):
        for x, edges, owner, y in run.microbatches(loader):
            loss = F.mse_loss(model(x, edges, owner, len(y)), y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
