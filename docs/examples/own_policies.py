"""Two policies in a loop of your own: a critic helps a solver, and both learn.

The solver reverses letters. After a wrong answer the critic speaks, and the solver answers again.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from wrap_grpo import (
    END,
    GROUP,
    LENGTH,
    MAX_TOKENS,
    Policy,
    advantages_of,
    digest,
    prompt_of,
    reward_of,
)

import holdfast
from holdfast.rl import BatchPlan, Mode, Observation, Rollouts, TurnLimits

POLICIES = ("solver", "critic")
PROMPTS = 4


def judge(answer):
    """Reply to a turn that is over, as an environment does."""
    if answer.speaker == "critic":
        return Observation(speaker="solver", state=answer.state)
    earned = reward_of(answer.prompt, answer.spoken)
    if answer.turn == 0 and earned < 1:
        return Observation(speaker="critic", state=earned)
    first = answer.state if answer.turn else earned
    return Observation(rewards={"solver": earned, "critic": max(0.0, earned - first)})


@torch.no_grad()
def play(team, answer):
    while not answer.finished:
        if answer.turn_over:
            answer.reply(judge(answer))
            continue
        table = team[answer.speaker](torch.tensor([answer.text]))[0, -1]
        token = answer.draw(table)
        answer.extend([token], [table[token].item()])


def loss_of(team, samples):
    return sum(loss_of_policy(team[name], samples, n) for n, name in enumerate(POLICIES))


def loss_of_policy(policy, samples, number):
    """Return the loss of one policy: on the tokens that it spoke, with the rewards that it got."""
    advantages = advantages_of([done.reward_of(number) for done in samples]).flatten()
    total, count = torch.zeros(()), 0
    for done, advantage in zip(samples, advantages, strict=True):
        before, old = len(done.prompt), iter(done.logprobs)
        table = policy(torch.tensor([[*done.prompt, *done.tokens[:-1]]]))[0]
        for (start, end), speaker in zip(done.spans, done.speakers, strict=True):
            spoken = list(done.tokens[start:end])
            behaved = torch.tensor([next(old) for _ in spoken])
            if speaker == number:
                rows = table[before + start - 1 : before + end - 1]
                ratio = (rows[range(len(spoken)), spoken] - behaved).exp()
                clipped = ratio.clamp(0.8, 1.28)
                total = total - torch.min(ratio * advantage, clipped * advantage).sum()
                count += len(spoken)
    return total / max(1, count)


@holdfast.resilient(mesh=holdfast.Mesh(dp=1))
def main(run, args):
    torch.manual_seed(args.seed)
    team = nn.ModuleDict({name: Policy() for name in POLICIES})
    optimizer = torch.optim.AdamW(team.parameters(), lr=3e-3)
    context = LENGTH + 1 + 3 * MAX_TOKENS + 1
    limits = TurnLimits(end=END, context=context, max_new_tokens=MAX_TOKENS, turns=True)
    shape = {"groups": PROMPTS, "group": GROUP, "steps": args.steps, "limits": limits}
    plan = BatchPlan(mode=Mode.SYNC, eta=0, **shape)
    rollouts = Rollouts(run, plan, prompt_of, policies=POLICIES)
    run.track(model=team, optimizer=optimizer, rollouts=rollouts)
    for _ in run.steps(args.steps):
        for answer in rollouts.samples():
            play(team, answer)
        samples = rollouts.batch()
        for _ in run.microbatches():
            run.backward(loss_of(team, samples))
        run.step(optimizer)
        run.log(reward=sum(done.reward for done in samples) / len(samples))
    result = {**run.metrics, "final_hash": digest(team), **rollouts.report()}
    if args.result:
        Path(args.result).write_text(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", help="file for the outcome")
    torch.set_num_threads(1)
    main(parser.parse_args())
