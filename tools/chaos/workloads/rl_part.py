"""The part of a process in an RL job of a workload: it trains, or it samples."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.adapters.rl.config import RLConfig
from holdfast.adapters.rl.rollout.worker import RolloutWorker
from holdfast.ckpt.transport import RunKey
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.errors import Stopped
from holdfast.elastic.membership.records import TRAINER


def do_part(config: RLConfig, train: Callable[[RunKey], None]) -> None:
    """Call ``train`` with the run's key in a trainer, else sample; return when told to stop."""
    torch.set_num_threads(1)
    channel = connect()
    try:
        if channel.role == TRAINER:
            train(channel.key)
        else:
            channel.ready(after=0, spec=None, info={})
            RolloutWorker(channel, config, stopped=channel.stopped).run()
            channel.done()
    except Stopped:
        return
    finally:
        channel.close()
