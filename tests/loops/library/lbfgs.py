"""LBFGS with a closure"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

X = torch.linspace(-1, 1, 8)[:, None]
DATA = torch.utils.data.TensorDataset(X, torch.sin(3 * X))
RTOL = 0.05  # a line search amplifies the last bits


def plain():
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    for step, (x, y) in enumerate(shuffled(DATA, batch=8, steps=5)):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):

        def closure():
            for x, y in run.microbatches(DATA):
                loss = F.mse_loss(model(x), y)
                run.backward(loss)
                run.log(loss=loss)

        run.minimize(optimizer, closure)
