"""``grpo.py``, wrapped: under any kill, no sample is lost and none is trained on twice."""

import argparse
import hashlib
import json
from pathlib import Path
from random import Random

import torch
from torch import nn

import holdfast
from holdfast.rl import BatchPlan, Mode, Rollouts, TurnLimits

LETTERS, LENGTH = 8, 3
END = LETTERS  # ends prompts and answers
PROMPTS, GROUP, MAX_TOKENS = 8, 8, LENGTH + 1


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(LETTERS + 1, 32)
        self.gru = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, LETTERS + 1)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0]).log_softmax(-1)


def prompt_of(ordinal):
    return (*Random(ordinal).choices(range(LETTERS), k=LENGTH), END)


def reward_of(prompt, answer):
    right = (*reversed(prompt[:-1]), END)
    return sum(a == b for a, b in zip(answer, right, strict=False)) / len(right)


@torch.no_grad()
def sample(policy, answer):
    while not answer.finished:
        table = policy(torch.tensor([answer.text]))[0, -1]
        token = answer.draw(table)
        answer.extend([token], [table[token].item()])


def advantages_of(rewards):
    groups = torch.tensor(rewards).view(-1, GROUP)
    return (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)


def loss_of(policy, samples, advantages):
    total = 0.0
    for (prompt, tokens, logprobs), advantage in zip(samples, advantages.flatten(), strict=True):
        table = policy(torch.tensor([[*prompt, *tokens[:-1]]]))[0, len(prompt) - 1 :]
        ratio = (table[range(len(tokens)), list(tokens)] - torch.tensor(logprobs)).exp()
        total = total - torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
    return total / sum(len(tokens) for _, tokens, _ in samples)


def digest(policy):
    weights = (weight.detach().numpy().tobytes() for weight in policy.parameters())
    return hashlib.sha256(b"".join(weights)).hexdigest()


@holdfast.resilient(mesh=holdfast.Mesh(dp=1))
def main(run, args):
    torch.manual_seed(args.seed)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    limits = TurnLimits(end=END, context=LENGTH + 1 + MAX_TOKENS, max_new_tokens=MAX_TOKENS)
    shape = {"groups": PROMPTS, "group": GROUP, "steps": args.steps, "limits": limits}
    rollouts = Rollouts(run, BatchPlan(mode=Mode.SYNC, eta=0, **shape), prompt_of)
    run.track(model=policy, optimizer=optimizer, rollouts=rollouts)
    for _ in run.steps(args.steps):
        for answer in rollouts.samples():
            sample(policy, answer)
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", help="file for the outcome")
    torch.set_num_threads(1)
    main(parser.parse_args())
