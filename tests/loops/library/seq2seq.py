"""Translation: encoder and decoder with teacher forcing"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

SOURCE = torch.randint(1, 12, (40, 5), generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(SOURCE, SOURCE.flip(1))


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRU(16, 16, batch_first=True)
        self.out = nn.Linear(16, 12)

    def forward(self, source, target):
        _, hidden = self.encoder(self.embed(source))
        begin = torch.zeros_like(target[:, :1])
        given = torch.cat([begin, target[:, :-1]], dim=1)
        out, _ = self.decoder(self.embed(given), hidden)
        return self.out(out)


def plain():
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (source, target) in enumerate(shuffled(DATA, batch=8, steps=5)):
        optimizer.zero_grad()
        out = model(source, target)
        loss = F.cross_entropy(out.flatten(0, 1), target.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for source, target in run.microbatches(DATA):
            out = model(source, target)
            loss = F.cross_entropy(out.flatten(0, 1), target.flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer)
