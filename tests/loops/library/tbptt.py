"""Truncated backpropagation through time within a microbatch"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

TEXT = torch.randint(0, 12, (40, 17), generator=torch.Generator().manual_seed(0))


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(12, 16), nn.LSTM(16, 16), nn.Linear(16, 12)

    def forward(self, text, state):
        out, state = self.rnn(self.embed(text), state)
        return self.out(out), state


def plain():
    model = CharRNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        text, state, total = text.T, None, 0.0
        optimizer.zero_grad()
        for at in range(0, 16, 4):
            out, state = model(text[at : at + 4], state)
            state = tuple(s.detach() for s in state)
            loss = F.cross_entropy(out.flatten(0, 1), text[at + 1 : at + 5].flatten()) / 4
            loss.backward()
            total += loss.item()
        optimizer.step()
        print(step, total)


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = CharRNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for _ in run.steps(5):
        for text in run.microbatches(TEXT):
            text, state, total = text.T, None, 0.0
            for at in range(0, 16, 4):
                out, state = model(text[at : at + 4], state)
                state = tuple(s.detach() for s in state)
                loss = F.cross_entropy(out.flatten(0, 1), text[at + 1 : at + 5].flatten()) / 4
                total += loss
            run.backward(total)
            run.log(loss=total)
        run.step(optimizer)
