"""Distillation from a frozen teacher"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
DATA = torch.utils.data.TensorDataset(X, (X[:, 0] > 0).long())


def mlp(width):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def plain():
    teacher = mlp(32).eval().requires_grad_(False)
    student = mlp(8)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):
        out = student(x)
        with torch.no_grad():
            wanted = teacher(x)
        soft = F.kl_div((out / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean")
        loss = 0.7 * 4 * soft + 0.3 * F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    teacher = mlp(32).eval().requires_grad_(False)
    student = mlp(8)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    run.track(student=student, optimizer=optimizer)
    for _ in run.steps(5):
        for x, y in run.microbatches(DATA):
            out = student(x)
            with torch.no_grad():
                wanted = teacher(x)
            soft = F.kl_div(
                (out / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean"
            )
            loss = 0.7 * 4 * soft + 0.3 * F.cross_entropy(out, y)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
