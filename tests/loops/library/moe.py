"""Mixture of experts with a balancing loss; some experts have no tokens, hence no gradient"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

TEXT = torch.randint(0, 16, (40, 5), generator=torch.Generator().manual_seed(0))


class MoE(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weight, chosen = probs.max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out[mine] = weight[mine, None] * expert(x[mine])
        share = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return x + out, len(self.experts) * (share * probs.mean((0, 1))).sum()


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.moe, self.head = nn.Embedding(16, 16), MoE(), nn.Linear(16, 16)

    def forward(self, text):
        x, balance = self.moe(self.embed(text[:, :-1]))
        return F.cross_entropy(self.head(x).flatten(0, 1), text[:, 1:].flatten()), balance


def plain():
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total = 0.0
    for i, text in enumerate(shuffled(TEXT, batch=2, steps=20)):
        loss, balance = model(text)
        ((loss + 0.01 * balance) / 4).backward()
        total += loss.item() / 4
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            print(i // 4, total)
            total = 0.0


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = LM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for text in run.microbatches(TEXT):
            loss, balance = model(text)
            run.backward(loss + 0.01 * balance)
            run.log(loss=loss)
        run.step(optimizer)
