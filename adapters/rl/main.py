"""The script of an RL job: every worker runs it, and its seat decides its part.

Under ``holdfast run`` seats ``trainer/N`` train and ``rollout/N`` sample. Started by hand it is the
whole job: one trainer rank, with a rollout worker on a thread beside it. Each part imports only
what it needs: imports are most of a worker's start.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch

from holdfast.adapters.rl.balance.settings import BalanceConfig
from holdfast.adapters.rl.config import PRESETS, ROLE, RLConfig, load_config, preset
from holdfast.ckpt.errors import HoldfastError, InternalError
from holdfast.ckpt.types import Json
from holdfast.elastic.channel.base import Channel, WorkerPhase
from holdfast.elastic.channel.connecting import connect
from holdfast.elastic.channel.solo import SoloChannel
from holdfast.elastic.errors import ConfigError, Stopped
from holdfast.elastic.events import Event
from holdfast.elastic.membership.records import TRAINER, Roster
from holdfast.elastic.processes.run_dirs import temporary_place

if TYPE_CHECKING:
    from holdfast.adapters.rl.rollout.worker import RolloutWorker
    from holdfast.adapters.rl.server.server import RolloutServer


class ThreadHost:
    """Stands in for a channel when the rollout worker is a thread of the trainer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.node, self.key, self.sidecar = channel.node, channel.key, channel.sidecar
        self.seat, self.incarnation = f"{ROLE}/0", uuid.uuid4().hex

    def roster(self) -> Roster:
        """Return the trainer's roster."""
        return self._channel.roster()

    def leaving(self) -> bool:
        """Return False: the node does not leave without the trainer."""
        return False

    def handed_over(self, *, generation: int, step: int) -> None:
        """Do nothing: no controller waits for it."""

    def beat(self, *, step: int, phase: WorkerPhase) -> None:
        """Do nothing: the trainer's own heartbeat is the process's."""

    def emit(self, event: Event) -> None:
        """Record the event as the trainer's."""
        self._channel.emit(event)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this process's part; return the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    if options.warm_up:
        return _warm_up(options)
    channel = connect()
    try:
        config = _config(options, channel.settings)
        if isinstance(channel, SoloChannel):
            _alone(channel, config, options.result)
        elif channel.role == TRAINER:
            with _server(channel) as server:
                _train(server, config, options.result)
        else:
            _roll_out(channel, config)
    except Stopped:
        return 0
    except InternalError:
        raise
    except HoldfastError as error:
        channel.fail(str(error), user_error=isinstance(error, ConfigError))
        sys.stderr.write(f"holdfast: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        channel.close()
    return 0


def _warm_up(options: argparse.Namespace) -> int:
    from holdfast.adapters.rl.weights import warm_up

    try:
        warm_up.prepare(_config(options, {}))
    except InternalError:
        raise
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _config(options: argparse.Namespace, overrides: Mapping[str, Json]) -> RLConfig:
    """Return the job's settings, with the command line's overrides, the same for every role."""
    config = load_config(options.config) if options.config else preset(options.preset)
    changes: dict[str, object] = {"policy": options.policy} if options.policy else {}
    if options.balance and config.balance is None:
        changes["balance"] = BalanceConfig()
    if disk := overrides.get("snapshots", {}).get("disk"):
        changes["disk"] = str(disk)
    try:
        config = msgspec.structs.replace(config, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.join is not None and not (config.policy or options.warm_up):
        raise ConfigError(
            f"join={config.join}: give --policy, the policy that this run trains: one of "
            f"{', '.join(config.trained)}"
        )
    return config


@contextmanager
def _server(channel: Channel) -> Iterator[RolloutServer]:
    from holdfast.adapters.rl.server.server import RolloutServer

    server = RolloutServer(channel.key)
    try:
        yield server
    finally:
        server.close()


def _train(server: RolloutServer, config: RLConfig, result: Path | None) -> None:
    from holdfast.adapters.rl.training.trainer import Trainer

    Trainer(config, server, result=result).run()


def _roll_out(channel: Channel, config: RLConfig) -> None:
    from holdfast.adapters.rl.rollout.worker import RolloutWorker

    if not config.leads:
        raise ConfigError(
            f"this run trains policy {config.policy}, and rollout workers belong to the run of "
            f"{config.lead}: give --role {ROLE}=N to that one alone"
        )
    channel.ready(after=0, spec=None, info={})
    RolloutWorker(channel, config, stopped=channel.stopped).run()
    channel.done()


def _alone(channel: SoloChannel, config: RLConfig, result: Path | None) -> None:
    """Run trainer and rollout worker in one process, warm-up included."""
    from holdfast.adapters.rl.rollout.worker import RolloutWorker
    from holdfast.adapters.rl.weights import warm_up

    if config.balance is not None:
        raise ConfigError(
            "balance moves workers of 'holdfast run --role rollout=N', and here one process is the "
            "whole job: start it so, or set balance to null"
        )
    over = threading.Event()
    with tempfile.TemporaryDirectory(prefix="holdfast-warm-", dir=temporary_place()) as directory:
        if config.warm.steps and config.warm_start is None and config.start is None:
            config = msgspec.structs.replace(config, warm_start=directory)
        if config.warm_start is not None:
            warm_up.prepare(config)
        if not config.leads:
            with _server(channel) as server:
                _train(server, config, result)
            return
        worker = RolloutWorker(ThreadHost(channel), config, stopped=over.is_set)
        with _server(channel) as server:
            thread = threading.Thread(
                target=_sample, args=(worker, server), name="rollout", daemon=True
            )
            thread.start()
            try:
                _train(server, config, result)
            finally:
                over.set()
                thread.join(timeout=5)


def _sample(worker: RolloutWorker, server: RolloutServer) -> None:
    """Run the rollout worker; its error ends the trainer, which would wait for it forever."""
    try:
        worker.run()
    except HoldfastError as error:
        server.give_up(error)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.rl", description="An asynchronous, elastic RL job."
    )
    parser.add_argument("--config", type=Path, help="JSON file of the job (see RLConfig)")
    parser.add_argument(
        "--preset", default="quick", help="used without --config: one of " + ", ".join(PRESETS)
    )
    parser.add_argument(
        "--result", type=Path, help="file into which rank 0 writes the outcome (JSON)"
    )
    parser.add_argument(
        "--policy",
        default="",
        help="the policy that this run trains, where each has a run of its own (join)",
    )
    parser.add_argument(
        "--balance",
        action="store_true",
        help="move workers between training and sampling as one waits for the other",
    )
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="make the warm start that the configuration names, and end",
    )
    return parser.parse_args(arguments)


def leave(status: int) -> NoReturn:
    """End the process at once: tearing down an interpreter with torch loaded takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
