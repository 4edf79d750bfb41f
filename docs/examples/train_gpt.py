"""A training script for a small GPT on the source code of Python's standard library.

Run it alone with ``python train_gpt.py``, elastic with ``holdfast run --nproc 4 train_gpt.py``.
It shows a progress bar where tqdm is installed.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import holdfast

try:
    from tqdm import tqdm
except ImportError:

    def tqdm(steps, **_):
        return steps


CONTEXT, WIDTH, HEADS, BLOCKS = 64, 64, 4, 3


class Text:
    """Bytes of the standard library; sample i is a window of them."""

    def __init__(self, files=80):
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
        data = bytearray(b"".join(path.read_bytes() for path in paths))
        self.data = torch.frombuffer(data, dtype=torch.uint8).long()

    def __len__(self):
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, i):
        return self.data[i * CONTEXT : (i + 1) * CONTEXT + 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text):
        x = self.token(text[:, :-1]) + self.place.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def main(args):
    text = Text()

    @holdfast.resilient(
        batch=holdfast.Batch(microbatches=8, size=4),
        exact=True,
        seed=args.seed,
        checkpoint=args.checkpoint and holdfast.Checkpoints(args.checkpoint, every=25),
    )
    def train(run):
        model = GPT()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=run.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.track(model=model, optimizer=optimizer)
        shown = {"initial": run.completed, "total": args.steps, "disable": not run.is_leader}
        for _ in tqdm(run.steps(args.steps), **shown):
            for microbatch in run.microbatches(text):
                loss = model(microbatch)
                run.backward(loss)
                run.log(loss=loss)
            run.clip_grad_norm_(model.parameters(), 1.0)
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--result", help="file for the hash of the final state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", help="directory for checkpoints")
    torch.set_num_threads(1)
    main(parser.parse_args())
