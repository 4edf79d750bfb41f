"""A small training in which every rank plays a game of its own, kept in a `PerRank`.

A game's score depends on nothing but its seat and the number of its turns, so `expected` is the
oracle. With ``--until FILE`` steps take a moment until the file exists, and the last waits for it;
with ``--differ`` a tracked tensor is another on every rank.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import holdfast

PACE_S = 0.3


class OwnGame:
    """A game whose state has a generator, a large array and a tensor that grows at its own pace."""

    def __init__(self, seat: int) -> None:
        self.seat, self.turns, self.score = seat, 0, 0
        self.rng = np.random.default_rng(seat)
        self.board = np.zeros(50_000 + seat)
        self.moves = torch.zeros(0)

    def play(self) -> None:
        """Make one turn."""
        draw = int(self.rng.integers(1 << 30))
        self.score = (self.score * 31 + draw) % (1 << 61)
        self.board[self.turns] = draw
        self.moves = torch.cat([self.moves, torch.full((self.seat + 1,), float(draw))])
        self.turns += 1

    def digest(self) -> list[Any]:
        """Return everything that a turn changes, in short."""
        return [self.score, float(self.board.sum()), float(self.moves.sum()), len(self.moves)]

    def state_dict(self) -> dict[str, Any]:
        """Return the game."""
        return {**vars(self), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with a game."""
        self.rng.bit_generator.state = state.pop("rng")
        vars(self).update(state)


def expected(seat: int, turns: int) -> list[Any]:
    """Return the digest of a game after some turns."""
    game = OwnGame(seat)
    for _ in range(turns):
        game.play()
    return game.digest()


def main(args: argparse.Namespace) -> None:
    """Train as the flags say."""
    torch.set_num_threads(1)

    def tell(**fields: object) -> None:
        with args.log.open("ab", buffering=0) as log:
            log.write(msgspec.json.encode(fields) + b"\n")

    @holdfast.resilient(
        batch=holdfast.Batch(microbatches=3, size=2),
        checkpoint=args.checkpoint and holdfast.Checkpoints(args.checkpoint, every=100),
    )
    def train(run: holdfast.Run) -> None:
        split = [*np.random.permutation(8).tolist(), random.random(), torch.rand(1).item()]
        tell(built=split)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        game = holdfast.PerRank(OwnGame(run.rank))
        dice = random.Random(run.rank)
        noise = torch.full((1000,), float(run.rank if args.differ else 0))
        best = {"seen": 0, "loss": np.float32(9)}
        run.track(
            model=model,
            optimizer=optimizer,
            game=game,
            dice=holdfast.PerRank(dice, on_resize="drop"),
            noise=noise,
            best=best,
        )
        assert best["seen"] == run.completed
        data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        for step in run.steps(args.steps):
            while args.until and not args.until.exists():
                time.sleep(PACE_S)
                run.check()
                if step < args.steps - 1:
                    break
            for x in run.microbatches(data):
                run.backward(model(x).square().mean())
            run.step(optimizer)
            game.value.play()
            dice.random()
            best["seen"] += 1
        tell(
            rank=run.rank,
            world=run.world_size,
            seat=game.value.seat,
            turns=game.value.turns,
            game=game.value.digest(),
            best=[best["seen"], type(best["loss"]).__name__],
        )

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint")
    parser.add_argument("--until", type=Path)
    parser.add_argument("--differ", action="store_true")
    main(parser.parse_args())
