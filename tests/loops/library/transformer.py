"""A language model in the manner of nanoGPT: tied weights, dropout, a schedule by hand"""

import math

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

NOISE = 0.1  # other dropout
TEXT = torch.randint(0, 32, (40, 9), generator=torch.Generator().manual_seed(0))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, text):
        x = self.tokens(text[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        x = self.head(self.norm(self.block(x, mask, is_causal=True)))
        return F.cross_entropy(x.flatten(0, 1), text[:, 1:].flatten())


def get_lr(step, most=1e-2, steps=5):
    return most * (step + 1) / 2 if step < 2 else most * (1 + math.cos(math.pi * step / steps)) / 2


def plain():
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step, text in enumerate(shuffled(TEXT, batch=8, steps=5)):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        loss = model(text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(5):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        for text in run.microbatches(TEXT):
            loss = model(text)
            run.backward(loss)
            run.log(loss=loss)
        run.clip_grad_norm_(model.parameters(), 1.0)
        run.step(optimizer)
