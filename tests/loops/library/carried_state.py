"""Truncated backpropagation with a state that is carried from step to step"""

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

LANES = torch.randint(0, 12, (8, 41), generator=torch.Generator().manual_seed(0))


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 16), nn.GRU(16, 16), nn.Linear(16, 12)

    def forward(self, text, state):
        out, state = self.rnn(self.embed(text), state)
        return self.out(out), state


def plain():
    model = CharRNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    state = torch.zeros(1, 8, 16)
    for step in range(5):
        text = LANES[:, 8 * step : 8 * step + 9].T
        out, state = model(text[:-1], state.detach())
        loss = F.cross_entropy(out.flatten(0, 1), text[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(batch=holdfast.Batch(microbatches=4), exact="float32", checkpoint="runs")
def port(run):
    model = CharRNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    state = torch.zeros(4, 1, 2, 16)
    run.track(model=model, optimizer=optimizer, state=state)
    for step in run.steps(5):
        mine = []
        for i in run.microbatches():
            text = LANES[2 * i : 2 * i + 2, 8 * step : 8 * step + 9].T
            out, after = model(text[:-1], state[i])
            mine.append(after.detach())
            loss = F.cross_entropy(out.flatten(0, 1), text[1:].flatten())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
        state.copy_(run.gather(mine))
