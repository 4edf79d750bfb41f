"""A small RL job in which each policy has a run of its own, and which reports samples and weights.

    holdfast run --nodes 2 --role rollout=1 -m holdfast.tools.chaos.workloads.policies \\
        --policy solver --join DIR --folder DIR
    holdfast run --nodes 2 -m holdfast.tools.chaos.workloads.policies \\
        --policy critic --join DIR --folder DIR

Rank 0 reports every sample with a digest of all its tokens, turns and rewards; the other ranks
report none, for their number changes. Every rank reports the digest of all weights after every
step. A finding of a ledger's checker ends the job. A folder keeps the run's checkpoints.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.ledger.checker import CheckConfig
from holdfast.adapters.rl.policy.model import weights_hash
from holdfast.adapters.rl.policy.policy import full_tensors
from holdfast.adapters.rl.policy.settings import PolicyConfig
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.server.server import RolloutServer
from holdfast.adapters.rl.training.trainer import Trainer
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.errors import JobFailedError
from holdfast.tools import chaos
from holdfast.tools.chaos.workloads.episodes import ids_of
from holdfast.tools.chaos.workloads.rl_part import do_part


class KeepingServer(RolloutServer):
    """A server that keeps the names of the samples of the newest step."""

    ids: Sequence[str] = ()

    def train(self, step: int, samples: Sequence[Trajectory], rewards: Sequence[float]) -> Any:
        """See `RolloutServer`."""
        self.ids = ids_of(samples)
        return super().train(step, samples, rewards)


class TellingTrainer(Trainer):
    """A trainer that reports the samples of each step before it, and the weights after it."""

    def __init__(self, config: RLConfig, server: KeepingServer, *, result: Path) -> None:
        super().__init__(config, server, result=result)
        self._keeping = server

    def _batches(self, job: Any, step: int) -> Any:
        found, run = super()._batches(job, step), job.run
        ids = self._keeping.ids if run.is_leader else ()
        chaos.samples(step + 1, ids, rank=run.rank, attempt=run.generation)
        return found

    def _step(self, job: Any, step: int) -> None:
        super()._step(job, step)
        run, digest = job.run, weights_hash(full_tensors(job.model))
        chaos.state_hash(step + 1, digest, rank=run.rank, attempt=run.generation)


def config_of(args: argparse.Namespace) -> RLConfig:
    """Return the settings of one policy's run."""
    tiny = preset("tiny")
    return msgspec.structs.replace(
        tiny,
        environment=EnvironmentConfig(factory="reviewed"),
        model=msgspec.structs.replace(tiny.model, context=40),
        policies={"solver": PolicyConfig(), "critic": PolicyConfig(lr=1e-4)},
        join=args.join,
        policy=args.policy,
        checkpoint=str(args.folder / "checkpoints"),
        checkpoint_every=2,
        warm=WarmStart(steps=0),
        steps=args.steps,
        evaluate_every=args.steps,
        held_out=2,
        check=CheckConfig(recompute_every=2, fatal=True),
        log_every_ticks=1,
    )


def main(args: argparse.Namespace) -> None:
    """Do this process's part."""
    config, result = config_of(args), args.folder / "result.json"

    def train(key: RunKey) -> None:
        server = KeepingServer(key)
        TellingTrainer(config, server, result=result).run()
        server.close()
        if result.exists():
            found = msgspec.json.decode(result.read_bytes())["violations"]
            if found:
                raise JobFailedError(f"the ledger's checker found {found}")

    do_part(config, train)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--join", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args())
