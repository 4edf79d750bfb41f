"""Segmentation: a small U-Net with a loss per pixel"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast

G = torch.Generator().manual_seed(0)
DATA = torch.utils.data.TensorDataset(
    torch.randn(40, 1, 8, 8, generator=G), torch.randint(0, 3, (40, 8, 8), generator=G)
)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x):
        skip = self.down(x)
        deep = self.deep(F.max_pool2d(skip, 2))
        return self.head(torch.cat([skip, self.up(deep)], dim=1))


def dice(out, target):
    probs, wanted = out.softmax(1), F.one_hot(target, 3).permute(0, 3, 1, 2).float()
    both = (probs * wanted).sum((2, 3))
    return 1 - (2 * both / (probs.sum((2, 3)) + wanted.sum((2, 3)) + 1e-6)).mean()


def plain():
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for step, (image, mask) in enumerate(shuffled(DATA, batch=8, steps=5)):
        optimizer.zero_grad()
        out = model(image)
        loss = F.cross_entropy(out, mask) + dice(out, mask)
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    model.train()
    for _ in run.steps(5):
        for image, mask in run.microbatches(DATA):
            out = model(image)
            loss = F.cross_entropy(out, mask) + dice(out, mask)
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
