"""An island that trains the benchmark's model, under ``holdfast run --island NAME --sea URL``."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash
from holdfast.tools.bench.islands.learner import (
    RATE,
    WIDTH,
    Windows,
    held_out,
    learner,
    parameters_of,
)
from holdfast.tools.bench.islands.outcome import Outcome, WindowClock


def main(args: argparse.Namespace) -> None:
    """Train a first step, ``args.steps`` that are measured, and a last; write the outcome.

    The merge of all portions at the end of the last step is not measured: a run makes it once.
    """
    data = Windows()

    @elastic.resilient(
        batch=elastic.Batch(microbatches=1, size=args.samples),
        snapshots=elastic.Snapshots(parity=0),
        seed=args.seed,
        islands=elastic.Islands(founders=args.founders),
    )
    def train(run: elastic.Run) -> None:
        model, optimizer = learner(args.seed, rate=args.rate, width=args.width)
        run.track(model=model, optimizer=optimizer)
        clock = window = None
        curve: list[float] = []
        for step in run.steps(args.steps + 2):
            for windows in run.microbatches(data):
                run.backward(model(windows))
            run.step(optimizer)
            if args.look and (step + 1) % args.look == 0:
                curve.append(held_out(model))
            if step == 0:
                clock = WindowClock(args.device)
            elif step == args.steps and clock is not None:
                window = clock.window(args.steps)
        assert window is not None
        found = Outcome(
            window=window,
            parameters=parameters_of(model),
            held_out=held_out(model),
            curve=tuple(curve),
            digest=state_hash({"model": model}),
        )
        Path(args.result).write_bytes(msgspec.json.encode(found))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--founders", type=int, required=True)
    parser.add_argument("--device", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--look", type=int, default=0, help="steps between looks at the loss")
    parser.add_argument("--result", required=True)
    main(parser.parse_args())
