"""Word vectors: sparse gradients with SparseAdam, beside dense ones"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

PAIRS = torch.randint(0, 30, (40, 2), generator=torch.Generator().manual_seed(0))


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(30, 8, sparse=True), nn.Linear(8, 30)

    def forward(self, pairs):
        return F.cross_entropy(self.out(self.words(pairs[:, 0])), pairs[:, 1])


def plain():
    model = SkipGram()
    sparse = torch.optim.SparseAdam(model.words.parameters(), lr=1e-2)
    dense = torch.optim.Adam(model.out.parameters(), lr=1e-2)
    for step, pairs in enumerate(shuffled(PAIRS, batch=8, steps=5)):
        loss = model(pairs)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = SkipGram()
    sparse = torch.optim.SparseAdam(model.words.parameters(), lr=1e-2)
    dense = torch.optim.Adam(model.out.parameters(), lr=1e-2)
    run.track(model=model, sparse=sparse, dense=dense)
    for _ in run.steps(5):
        for pairs in run.microbatches(PAIRS):
            loss = model(pairs)
            run.backward(loss)
            run.log(loss=loss)
        run.step(sparse, dense)
