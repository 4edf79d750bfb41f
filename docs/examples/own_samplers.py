"""``wrap_grpo.py`` with sampling in separate processes, which may come and go.

Start any number of samplers, at any time, and the loop beside them:

    python own_samplers.py --directory /tmp/meet --sample &
    python own_samplers.py --directory /tmp/meet --sample &
    holdfast run --nodes 2 own_samplers.py --directory /tmp/meet
"""

import argparse
import json
from pathlib import Path

import torch
from wrap_grpo import (
    END,
    GROUP,
    LENGTH,
    MAX_TOKENS,
    PROMPTS,
    Policy,
    advantages_of,
    digest,
    loss_of,
    prompt_of,
    reward_of,
    sample,
)

import holdfast
from holdfast.rl import BatchPlan, Mode, Rollouts, TurnLimits, attach


def sample_all(directory):
    """Run as a sampler process until the loop is over."""
    policy = Policy()
    with attach(directory, policy.load_state_dict) as sampler:
        for answer in sampler.samples():
            sample(policy, answer)


@holdfast.resilient(mesh=holdfast.Mesh(dp=1))
def train(run, args):
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    limits = TurnLimits(end=END, context=LENGTH + 1 + MAX_TOKENS, max_new_tokens=MAX_TOKENS)
    shape = {"groups": PROMPTS, "group": GROUP, "steps": args.steps, "limits": limits}
    rollouts = Rollouts(run, BatchPlan(mode=Mode.SYNC, eta=0, **shape), prompt_of)
    run.track(model=policy, optimizer=optimizer, rollouts=rollouts)
    with rollouts.serve(args.directory, policy):
        for _ in run.steps(args.steps):
            samples = [(done.prompt, done.tokens, done.logprobs) for done in rollouts.batch()]
            rewards = [reward_of(prompt, tokens) for prompt, tokens, _ in samples]
            for _ in run.microbatches():
                run.backward(loss_of(policy, samples, advantages_of(rewards)))
            run.step(optimizer)
            run.log(reward=sum(rewards) / len(rewards))
    result = {**run.metrics, "final_hash": digest(policy), **rollouts.report()}
    if args.result:
        Path(args.result).write_text(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", required=True, help="where loop and samplers meet")
    parser.add_argument("--sample", action="store_true", help="be one of those that sample")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", help="file for the outcome")
    torch.set_num_threads(1)
    args = parser.parse_args()
    sample_all(args.directory) if args.sample else train(args)
