"""The functions of ranks that train adapters, in a module that a new process can import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from rank_bodies import run_of

from holdfast.adapters.rl.config import preset
from holdfast.adapters.rl.loss.ppo import target_logprobs
from holdfast.adapters.rl.policy.lora import LoraConfig
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import full_tensors, shard
from holdfast.adapters.rl.training.update import make_optimizer
from holdfast.adapters.rl.weights.retained import Retained
from holdfast.adapters.rl.weights.setup import Policies
from holdfast.elastic.config import Batch, Settings
from holdfast.elastic.groups import reform

STEPS = 3
CONFIG = msgspec.structs.replace(preset("tiny"), lora=LoraConfig(rank=4))


def train(world: reform.GenerationWorld, folder: Path) -> dict[str, Any]:
    """Train a few steps; return the hashes of the last weights, and of those that are retained."""
    policies = Policies(CONFIG)
    policy, earlier = policies.build(), [policies.build() for _ in range(2)]
    for each in (policy, *earlier):
        shard(each, world.mesh)
    optimizer, retained = make_optimizer(policy.parameters(), lr=1e-2), Retained(earlier)
    run, _ = run_of(world, Settings(batch=Batch(microbatches=4), exact="float32", seed=7))
    run.track(model=policy, optimizer=optimizer, retained=retained)
    tokens = torch.arange(4 * 2 * 12).reshape(4, 2, 12) % 90 + 30
    seen = []
    for step in run.steps(STEPS):
        for index in run.microbatches():
            run.backward(-target_logprobs(policy(tokens[index]), tokens[index]).mean())
        run.fence()
        retained.keep(policy, version=step)
        run.step(optimizer)
        seen.append(weights_hash(full_tensors(policy)))
    run._finish()
    slots = [weights_hash(full_tensors(each)) for each in earlier]
    own = [parameter.to_local().numel() for parameter in policy.parameters()]  # type: ignore[operator]
    run._close()
    return {
        "seen": seen,
        "retained": dict(zip(retained.versions.tolist(), slots, strict=True)),
        "elements": own,
    }
