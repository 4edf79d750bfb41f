"""The one channel of this process to the rest of the job."""

from __future__ import annotations

import os

import msgspec

from holdfast.elastic.channel.base import WORKER_ENV, AgentChannel, Channel, WorkerConfig

_connected: Channel | None = None


def connect() -> Channel:
    """Return this process's one channel: to the node's agent if that started the process.

    A script started by another launcher has a `LaunchedChannel`. One started by hand has a
    `SoloChannel`, which acts as agent and coordinator itself. Every call returns the same channel;
    a closed channel of these two kinds is replaced.
    """
    global _connected  # noqa: PLW0603 - the process has one agent, so one channel
    config = os.environ.get(WORKER_ENV)
    if config is None:
        kind = _kind_without_agent()
        if not isinstance(_connected, kind) or _connected.stopped():
            _connected = kind()
    elif not isinstance(_connected, AgentChannel):
        _connected = AgentChannel(msgspec.json.decode(config, type=WorkerConfig))
    return _connected


def _kind_without_agent() -> type[Channel]:
    """Return the kind of channel for a script that `holdfast run` did not start.

    A worker of an agent needs neither kind, so the imports happen here.
    """
    from holdfast.elastic.channel.surroundings import is_launched

    if not is_launched(os.environ):
        from holdfast.elastic.channel.solo import SoloChannel

        return SoloChannel
    from holdfast.elastic.channel.launched import LaunchedChannel

    return LaunchedChannel
