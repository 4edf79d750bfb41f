"""Detection: images and targets in lists, by a collate function; a dictionary of losses"""

import torch
from ordinary import shuffled
from torch import nn
from torch.nn import functional as F

import holdfast


class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        g = torch.Generator().manual_seed(index)
        count = index % 3 + 1
        image = torch.randn(3, 8, 8, generator=g)
        boxes, labels = (
            torch.rand(count, 4, generator=g),
            torch.randint(0, 4, (count,), generator=g),
        )
        return image, {"boxes": boxes, "labels": labels}


def collate_fn(batch):
    return tuple(zip(*batch, strict=True))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.boxes, self.classes = nn.Linear(72, 4), nn.Linear(72, 4)

    def forward(self, images, targets):
        found = self.backbone(torch.stack(images))
        boxes, classes = self.boxes(found), self.classes(found)
        each = [
            {
                "boxes": F.l1_loss(box.expand_as(target["boxes"]), target["boxes"]),
                "classes": F.cross_entropy(kind.expand(len(target["labels"]), 4), target["labels"]),
            }
            for box, kind, target in zip(boxes, classes, targets, strict=True)
        ]
        return {name: torch.stack([losses[name] for losses in each]).mean() for name in each[0]}


def plain():
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = shuffled(Boxes(), batch=8, steps=5, collate_fn=collate_fn)
    for step, (images, targets) in enumerate(loader):
        losses = model(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


@holdfast.resilient(
    batch=holdfast.Batch(microbatches=4, size=2), exact="float32", checkpoint="runs"
)
def port(run):
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(Boxes(), batch=8, collate_fn=collate_fn)
    for _ in run.epochs(1, loader):
        for images, targets in run.microbatches(loader):
            losses = model(images, targets)
            loss = sum(losses.values())
            run.backward(loss)
            run.log(loss=loss)
        run.step(optimizer)
