"""A training script on noisy pictures that worker processes read, over three epochs.

Run it alone with ``python train_loader.py``, elastic with ``holdfast run --nproc 3
train_loader.py``; then kill any rank, or any of the processes that read data. With ``--stream`` the
same pictures come from an iterable data set that keeps its own position.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast

PICTURES, CLASSES, SIDE = 203, 4, 8


def picture(index):
    """Return a picture and its class; the noise differs in every epoch."""
    label = index % CLASSES
    clean = torch.zeros(SIDE, SIDE)
    clean[label * 2 : label * 2 + 2] = 1.0
    return clean + 0.3 * torch.randn(SIDE, SIDE), label


class Pictures(Dataset):
    def __len__(self):
        return PICTURES

    def __getitem__(self, index):
        return picture(index)


class PictureStream(IterableDataset):
    """Divides its pictures among the data workers, as iterable data sets do; saves its position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        info = get_worker_info()
        while self.at * info.num_workers + info.id < PICTURES:
            self.at += 1
            yield picture((self.at - 1) * info.num_workers + info.id)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main(args):
    data = PictureStream() if args.stream else Pictures()

    @holdfast.resilient(batch=holdfast.Batch(microbatches=6), exact=True)
    def train(run):
        model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = run.loader(data, batch=24, num_workers=args.workers)
        run.track(model=model, optimizer=optimizer)
        for _ in run.epochs(args.epochs, loader):
            for pictures, labels in run.microbatches(loader):
                loss = F.cross_entropy(model(pictures), labels)
                run.backward(loss)
                run.log(loss=loss)
            run.step(optimizer)
        result = {
            "final_hash": holdfast.state_hash({"model": model, "optimizer": optimizer}),
            "steps": run.completed,
            "loss": run.metrics.get("loss"),
        }
        if run.is_leader and args.result:
            Path(args.result).write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes that read data, per rank")
    parser.add_argument("--stream", action="store_true", help="read from an iterable data set")
    parser.add_argument("--result", help="file for the hash of the final state")
    torch.set_num_threads(1)
    main(parser.parse_args())
