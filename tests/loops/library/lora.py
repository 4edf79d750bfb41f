"""LoRA by hand on a frozen model"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

TEXT = torch.randint(0, 16, (40, 9), generator=torch.Generator().manual_seed(0))


class LoRALinear(nn.Module):
    def __init__(self, linear, rank=4, alpha=8):
        super().__init__()
        self.linear = linear
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) * 0.02)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.A.T) @ self.B.T


def build():
    model = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    model.requires_grad_(False)
    model[1], model[3] = LoRALinear(model[1]), LoRALinear(model[3])
    return model


def plain():
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for text in run.microbatches(TEXT):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
