"""A small RL job whose environment runs in processes, and which reports its samples and weights.

    holdfast run --nodes 2 --role rollout=1 -m holdfast.tools.chaos.workloads.episodes --folder DIR

A sample is reported with a digest of all its tokens, turns and rewards. Each turn, the environment
takes some memory and some time. No process but the trainer's first rank reports, so there is one
attempt.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.adapters.rl.config import RLConfig, WarmStart, preset
from holdfast.adapters.rl.environments.process_settings import ProcessConfig
from holdfast.adapters.rl.environments.registry import EnvironmentConfig
from holdfast.adapters.rl.samples.trajectory import Trajectory
from holdfast.adapters.rl.server.server import RolloutServer
from holdfast.adapters.rl.training.trainer import Trainer
from holdfast.ckpt.transport import RunKey
from holdfast.tools import chaos
from holdfast.tools.chaos.workloads.rl_part import do_part


class TellingServer(RolloutServer):
    """A server that reports the samples of each step."""

    def train(self, step: int, samples: Sequence[Trajectory], rewards: Sequence[float]) -> Any:
        """See `RolloutServer`."""
        chaos.samples(step + 1, ids_of(samples), rank=0, attempt=0)
        return super().train(step, samples, rewards)


def ids_of(samples: Sequence[Trajectory]) -> list[str]:
    """Return a name for each sample that also says what is in it."""
    return [f"{each.ordinal}/{each.sample} {_digest(each)}" for each in samples]


def _digest(sample: Trajectory) -> str:
    content = (sample.tokens, sample.logprobs, sample.turns)
    return hashlib.blake2s(msgspec.json.encode(content), digest_size=8).hexdigest()


def config_of(args: argparse.Namespace) -> RLConfig:
    """Return the settings of the job."""
    tiny = preset("tiny")
    return msgspec.structs.replace(
        tiny,
        environment=EnvironmentConfig(
            factory="holdfast.tools.chaos.workloads.hungry_tool:HungryTool",
            settings={"latency_s": args.latency_s},
            limit_s=args.limit_s,
            attempts=4,
            processes=ProcessConfig(count=4, memory="256MiB", yields=False),
        ),
        model=msgspec.structs.replace(tiny.model, context=96),
        warm=WarmStart(steps=0),
        steps=args.steps,
        evaluate_every=args.steps,
        held_out=2,
        log_every_ticks=1,
    )


def main(args: argparse.Namespace) -> None:
    """Do this process's part."""
    config, result = config_of(args), args.folder / "result.json"

    def train(key: RunKey) -> None:
        server = TellingServer(key)
        Trainer(config, server, result=result).run()
        server.close()
        if result.exists():
            found = msgspec.json.decode(result.read_bytes())
            chaos.state_hash(config.steps, found["final_hash"], rank=0, attempt=0)

    do_part(config, train)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--latency-s", type=float, default=0.2)
    parser.add_argument("--limit-s", type=float, default=8.0)
    main(parser.parse_args())
