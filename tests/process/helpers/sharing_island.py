"""An island that samples, learns from its samples, and shares them where its sea meets.

With ``--gate STEP FILE`` it waits once that step is complete, until the file exists. It writes a
line for each batch to ``--told FILE``: the step, and the origins of the groups of others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from tiny_training import wait_for
from torch import nn

import holdfast
from holdfast import elastic
from holdfast.ckpt.state.hashing import state_hash
from holdfast.rl import BatchPlan, Borrowed, Mode, Rollouts, Share, Trajectory, TurnLimits

OWN, OTHERS, GROUP, TOKENS = 2, 1, 2, 10
_TURN_S = 120.0


def loss_of(policy: nn.Module, samples: list[Trajectory]) -> torch.Tensor:
    """Return the loss of groups, whose answers earn by their even tokens."""
    total = torch.zeros(())
    for first in range(0, len(samples), GROUP):
        group = samples[first : first + GROUP]
        rewards = [sum(token % 2 == 0 for token in each.tokens) for each in group]
        for sample, reward in zip(group, rewards, strict=True):
            before = torch.tensor([sample.prompt[-1], *sample.tokens[:-1]])
            table = policy(before).log_softmax(-1)
            chosen = table[range(len(sample.tokens)), list(sample.tokens)]
            total = total - (reward - sum(rewards) / len(group)) * chosen.sum()
    return total / len(samples)


def main(args: argparse.Namespace) -> None:
    """Sample and train as the flags say."""
    torch.set_num_threads(1)
    islands = holdfast.Islands(
        name=args.name, meet=args.meet, every=8, portions=2, overlap=2, founders=2
    )
    share = Share(meet=args.meet, name=args.name, own=OWN, others=OTHERS, family="even")
    limits = TurnLimits(end=TOKENS - 1, context=12, max_new_tokens=4)
    shape = {"groups": OWN + OTHERS, "group": GROUP, "steps": args.steps, "limits": limits}
    plan = BatchPlan(mode=Mode.SYNC, eta=0, **shape)

    @elastic.resilient(
        batch=elastic.Batch(microbatches=2, size=GROUP),
        exact="float32",
        checkpoint=args.checkpoint and elastic.Checkpoints(args.checkpoint, every=5),
        snapshots=elastic.Snapshots(parity=0),
        islands=islands,
    )
    def train(run: elastic.Run) -> None:
        policy = nn.Sequential(nn.Embedding(TOKENS, 16), nn.Linear(16, 16), nn.Linear(16, TOKENS))
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)

        def prompt_of(ordinal: int) -> tuple[int, ...]:
            return tuple(Random(f"{args.name} {ordinal}").choices(range(TOKENS), k=3))

        rollouts = Rollouts(run, plan, prompt_of, share=share, fatal=True)
        run.track(model=policy, optimizer=optimizer, rollouts=rollouts)
        for step in run.steps(args.steps):
            if args.gate and step == int(args.gate[0]):
                wait_for(Path(args.gate[1]), run)
            for answer in rollouts.samples():
                while not answer.finished:
                    table = policy(torch.tensor(answer.text[-1:]))[0].log_softmax(-1).detach()
                    token = answer.draw(table)
                    answer.extend([token], [table[token].item()])
            samples = rollouts.batch()
            assert rollouts._sharing is not None
            rollouts._sharing.await_turn(_TURN_S)  # so that the groups of others come in some step
            origins = [str(each.origin) for each in samples if isinstance(each, Borrowed)]
            with args.told.open("a") as told:
                told.write(json.dumps([step, sorted(set(origins))]) + "\n")
            for _ in run.microbatches():
                loss = loss_of(policy, samples)
                run.backward(loss)
                run.log(loss=loss)
            run.step(optimizer)
        result = {"hash": state_hash({"model": policy}), **rollouts.report()}
        Path(args.result).write_text(json.dumps(result))

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--result", required=True)
    parser.add_argument("--told", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--checkpoint")
    parser.add_argument("--gate", nargs=2)
    main(parser.parse_args())
