"""A small reinforcement learning job whose answers come from servers, which are its workers too.

    holdfast run --nodes 2 --world 1 --role rollout=2 engines.py --meet runs/meet

Rank 0 has a pool of the servers that are there. The tokens follow from the weights of the policy,
so that the states show whether each was sampled with the right ones. It reports its samples and its
states as `tiny` does, and fails if the ledger has a finding.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast
from holdfast import elastic
from holdfast.rl import (
    AnnouncedServers,
    BatchPlan,
    CompletionServer,
    EnginePool,
    Mode,
    Rollouts,
    Trajectory,
    TurnLimits,
    keep_server,
)
from holdfast.tools import chaos
from holdfast.tools.chaos.hooks import GATE, digest
from holdfast.tools.chaos.workloads import answers_server
from holdfast.tools.chaos.workloads.answers_server import END, TOKENS

LIMITS = TurnLimits(end=END, context=32, max_new_tokens=20)
GATED_S = 1.0


class SmallPolicy(nn.Module):
    """Log-probabilities of the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 8), nn.Linear(8, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities [text, token] after each of ``tokens`` [text]."""
        found: Tensor = self.head(self.embed(tokens)).log_softmax(-1)
        return found


def prompt_of(ordinal: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    return (ordinal % TOKENS, ordinal // TOKENS % TOKENS, 3)


def server_at(url: str, *, silence_s: float = 30.0) -> CompletionServer:
    """Return the engine of a server's address."""
    import httpx2

    def load(weights: Mapping[str, Tensor], version: int) -> None:
        body = {"version": version, "weights": digest(weights)}
        found = httpx2.post(f"{url}/load", json=body, timeout=silence_s, trust_env=False)
        found.raise_for_status()

    return CompletionServer(
        url=url, limits=LIMITS, load_with=load, by_place=True, capacity=4, silence_s=silence_s
    )


def loss_of(policy: SmallPolicy, samples: Sequence[Trajectory]) -> Tensor:
    """Return the loss: answers with many different tokens become likelier."""
    losses = []
    for done in samples:
        text = torch.tensor([*done.prompt, *done.tokens])
        table = policy(text[:-1])[len(done.prompt) - 1 :]
        chosen = table[range(len(done.tokens)), list(done.tokens)]
        losses.append(-chosen.mean() * len(set(done.tokens)) / TOKENS)
    return torch.stack(losses).mean()


def main(args: argparse.Namespace) -> None:
    """Train with the options of the command line."""
    torch.set_num_threads(1)
    gate = os.environ.get(GATE, "")

    @elastic.resilient(mesh=holdfast.Mesh(dp=1), snapshots=elastic.Snapshots(keep=3))
    def train(run: elastic.Run) -> None:
        torch.manual_seed(0)
        policy = SmallPolicy()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        shape: dict[str, Any] = {"groups": 4, "group": 4, "steps": args.steps, "limits": LIMITS}
        rollouts = Rollouts(run, BatchPlan(mode=Mode.SYNC, eta=0, **shape), prompt_of)
        run.track(model=policy, optimizer=optimizer, rollouts=rollouts)
        servers = AnnouncedServers(args.meet, partial(server_at, silence_s=args.silence / 2))
        pool = EnginePool(servers, retry_s=0.2, wait_s=args.wait)
        for step in run.steps(args.steps):
            line = {"rank": run.rank, "attempt": run.generation}
            if answers := list(rollouts.samples()):
                pool.load(policy.state_dict(), version=answers[0].version)
                pool.finish(answers)
            samples = rollouts.batch()
            ids = [f"{done.ordinal}/{done.sample}" for done in samples]
            for _ in run.microbatches():
                run.backward(loss_of(policy, samples))
            chaos.samples(step + 1, ids, **line)  # Holdfast counts complete steps
            run.step(optimizer)
            state = {"model": policy.state_dict(), "optimizer": optimizer.state_dict()}
            chaos.state_hash(step + 1, state, **line)
            time.sleep(0 if not gate or Path(gate).exists() else GATED_S)
        if found := rollouts.report()["violations"]:
            raise RuntimeError(f"the ledger's checker found {found}")

    train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--meet", required=True, help="the folder in which servers announce")
    parser.add_argument("--wait", type=float, default=240.0)
    parser.add_argument("--silence", type=float, default=60.0, help="of a server that hangs")
    given = parser.parse_args()
    server = [sys.executable, answers_server.__file__, "--port", "{port}"]
    server += ["--keeper", str(os.getpid())]
    if not keep_server(given.meet, server, ready="/", silence_s=given.silence):
        main(given)
