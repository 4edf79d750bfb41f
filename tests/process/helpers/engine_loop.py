"""A training loop of the tiny included policy, for which other processes sample.

python engine_loop.py MODE DIRECTORY STEPS RESULT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from completion_server import CONFIG, LIMITS

import holdfast
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.model import build_model
from holdfast.rl import BatchPlan, Mode, Rollouts

PROMPTS = [tuple(each) for each in (b"abc>", b"zebra>", b"q>", b"xy>")]


def prompt_of(ordinal: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    return PROMPTS[ordinal % len(PROMPTS)]


@holdfast.resilient(mesh=holdfast.Mesh(dp=1), snapshots=holdfast.Snapshots(keep=3))
def train(run: Any, mode: str, directory: str, steps: int, result: str) -> None:
    """Train on what the others sample; each answer is made a little likelier."""
    policy = build_model(CONFIG.model, seed=1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    shape: dict[str, Any] = {"groups": 2, "group": 2, "steps": steps, "limits": LIMITS}
    plan = BatchPlan(mode=Mode(mode), eta=1, **shape)
    rollouts = Rollouts(run, plan, prompt_of)
    run.track(model=policy, optimizer=optimizer, rollouts=rollouts)
    found: dict[str, Any] = {"tokens": [], "versions": []}
    with rollouts.serve(directory, policy):
        for _ in run.steps(steps):
            samples = rollouts.batch()
            for _ in run.microbatches():
                means = torch.stack([mean_logprob(policy, each) for each in samples])
                run.backward(-means.mean())
            run.step(optimizer)
            found["tokens"] += [each.tokens for each in samples]
            found["versions"] += [each.token_versions for each in samples]
    hashes = [float(each.detach().double().sum()) for each in policy.parameters()]
    Path(result).write_text(json.dumps({**found, **rollouts.report(), "hashes": hashes}))


def mean_logprob(policy: Any, done: Any) -> torch.Tensor:
    """Return the mean log-probability of an answer's tokens."""
    text = torch.tensor([[*done.prompt, *done.tokens]])
    found: torch.Tensor = target_logprobs(policy(text), text)[0, len(done.prompt) - 1 :]
    return found.mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, directory, steps, result = sys.argv[1:]
    train(mode, directory, int(steps), result)
