"""A small reinforcement learning job: a tiny Llama learns from the answers of servers.

    holdfast run --nodes 2 --world 1 --role rollout=2 -m holdfast.tools.vllm.loop --folder llama

Workers of the role ``rollout`` are vLLM servers. With ``--engine built-in`` rank 0 samples by
itself, with the same noise, and so the same tokens. The loss takes only the tokens from the engine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import holdfast
from holdfast import elastic
from holdfast.adapters.rl.engines.announced import AnnouncedServers
from holdfast.adapters.rl.engines.built_in import BuiltInEngine
from holdfast.adapters.rl.engines.keeping import keep_server
from holdfast.adapters.rl.engines.pool import EnginePool
from holdfast.adapters.rl.engines.vllm import VLLMServer
from holdfast.adapters.rl.engines.weight_folder import WeightFolder
from holdfast.adapters.rl.library import BatchPlan, Mode, Rollouts, Trajectory
from holdfast.adapters.rl.policy.pretrained import load_pretrained
from holdfast.tools.vllm.llama import LIMITS, prompt_of, save_llama, tiny_llama
from holdfast.tools.vllm.program import READY, vllm_command, vllm_program, vllm_variables

GROUPS: Final = 4
GROUP: Final = 4
SLOTS: Final = 4
_WAIT_S: Final = 1800.0


def reward_of(done: Trajectory) -> float:
    """Return the share of even tokens."""
    return sum(token % 2 == 0 for token in done.tokens) / len(done.tokens)


def loss_of(model: Any, samples: Sequence[Trajectory]) -> Tensor:
    """Return the loss of GRPO's advantages, on policy."""
    rewards = torch.tensor([reward_of(done) for done in samples]).view(-1, GROUP)
    centered = rewards - rewards.mean(1, keepdim=True)
    advantages = (centered / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    losses = []
    for done, advantage in zip(samples, advantages, strict=True):
        text = torch.tensor([[*done.prompt, *done.tokens]])
        table = model(text[:, :-1]).logits[0, len(done.prompt) - 1 :].log_softmax(-1)
        losses.append(-advantage * table[range(len(done.tokens)), list(done.tokens)].mean())
    return torch.stack(losses).mean()


class _BuiltIn(BuiltInEngine):
    """The included engine, which knows the model's parameters by its own names."""

    def load(self, weights: Any, *, version: int) -> None:
        """Load the weights of a policy version."""
        super().load({f"lm.{name}": each for name, each in weights.items()}, version=version)


def pool_of(engine: str, folder: Path) -> EnginePool:
    """Return the pool of the servers that are there, or of the included engine."""
    if engine == "built-in":
        policy = load_pretrained(str(save_llama(folder)), context=LIMITS.context)
        return EnginePool([_BuiltIn(policy, limits=LIMITS, slots=SLOTS)])
    weights = WeightFolder(folder / "weights")
    servers = AnnouncedServers(
        folder / "meet",
        lambda url: VLLMServer(url=url, limits=LIMITS, capacity=SLOTS, weights=weights),
    )
    return EnginePool(servers, wait_s=_WAIT_S)


def main(args: argparse.Namespace) -> None:
    """Train, and write the result."""
    torch.set_num_threads(1)

    @elastic.resilient(mesh=holdfast.Mesh(dp=1), snapshots=elastic.Snapshots(keep=3))
    def train(run: elastic.Run) -> None:
        model = tiny_llama(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        shape: dict[str, Any] = {"groups": GROUPS, "group": GROUP, "limits": LIMITS}
        plan = BatchPlan(mode=Mode.SYNC, eta=0, steps=args.steps, **shape)
        rollouts = Rollouts(run, plan, prompt_of)
        run.track(model=model, optimizer=optimizer, rollouts=rollouts)
        pool = pool_of(args.engine, args.folder)
        for _ in run.steps(args.steps):
            if answers := list(rollouts.samples()):
                pool.load(model.state_dict(), version=answers[0].version)
                pool.finish(answers)
            samples = rollouts.batch()
            for _ in run.microbatches():
                run.backward(loss_of(model, samples))
            run.step(optimizer)
            tokens = sum(len(done.tokens) for done in samples)
            run.log(reward=sum(map(reward_of, samples)) / len(samples), tokens=tokens)
        result = {**run.metrics, "steps": run.completed, "ledger": rollouts.report()}
        result["moved"] = pool.moved
        result["final_hash"] = holdfast.state_hash({"model": model})
        if args.result:
            args.result.write_text(json.dumps(result))

    train()


def serve(args: argparse.Namespace) -> bool:
    """Keep a vLLM server if this worker is to be one; return whether it was."""
    if args.engine != "vllm":
        return False
    os.environ.update(vllm_variables(cuda=torch.cuda.is_available()))
    command = vllm_command(
        vllm_program(),
        save_llama(args.folder),
        context=LIMITS.context,
        place={"checkpoints": str(args.folder / "weights")},
    )
    return keep_server(args.folder / "meet", command, ready=READY, start_s=_WAIT_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for model, weights and servers")
    parser.add_argument("--engine", choices=("vllm", "built-in"), default="vllm")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--result", type=Path, help="file for the outcome")
    given = parser.parse_args()
    given.folder = given.folder.absolute()
    if not serve(given):
        main(given)
