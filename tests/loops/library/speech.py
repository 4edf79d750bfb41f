"""Speech: a loss over sequences of different lengths (CTC), padded by a collate function"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import holdfast


class Speech(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        return torch.randn(8 + index % 5, 6, generator=g), torch.randint(1, 5, (3,), generator=g)


def collate(batch):
    sounds, words = zip(*batch, strict=True)
    lengths = torch.tensor([len(sound) for sound in sounds])
    return pad_sequence(sounds, batch_first=True), lengths, torch.stack(words)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(6, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, sounds):
        return self.out(F.relu(self.conv(sounds.mT)).mT).log_softmax(-1)


def plain():
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = shuffled(Speech(), batch=8, steps=5, collate_fn=collate)
    for step, (sounds, lengths, words) in enumerate(loader):
        out = model(sounds).transpose(0, 1)
        loss = F.ctc_loss(out, words, lengths, torch.full((len(words),), 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Listener()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Speech(), batch=8, collate_fn=collate)
    for _ in run.epochs(1, loader):
        for sounds, lengths, words in run.microbatches(loader):
            out = model(sounds).transpose(0, 1)
            loss = F.ctc_loss(out, words, lengths, torch.full((len(words),), 3))
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
