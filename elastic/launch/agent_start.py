"""The start of a node's agent, with its configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from holdfast.ckpt.descriptors import descriptor_of
from holdfast.ckpt.errors import PeerError
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.workers import server_spec
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.run_folder import KEY
from holdfast.elastic.preload.client import ForkServer
from holdfast.elastic.processes.children import Child
from holdfast.elastic.processes.configured import configured_argv, start_configured

_MODULE: Final = "holdfast.elastic.agent"


def agent_config(
    config: LaunchConfig, node: NodeSpec, *, run: str, run_dir: Path, coordinator: str
) -> AgentConfig:
    """Return the configuration of a node's agent; ``coordinator`` is the address."""
    return AgentConfig(
        run=run,
        node=node.name,
        domain=node.domain,
        run_dir=str(run_dir),
        key_file=str(run_dir / KEY),
        coordinator=coordinator,
        slots=node.slots,
        wanted=dict(config.wanted),
        nodes=len(config.nodes) - len(config.absent) + config.elsewhere,
        command=config.command,
        env=dict(config.env),
        capture_output=config.capture_output,
        stamp_output=config.stamp_output,
        history_bytes=config.history_bytes,
        max_attempts=config.max_attempts,
        settings=dict(config.settings),
        timing=config.timing,
        notice=config.notice,
        host=config.host,
        memory_of=node.name if config.apart else "",
        preload=config.preload,
        most_watchers=config.most_watchers,
    )


def start_agent(
    config: AgentConfig,
    *,
    env: Mapping[str, str],
    stdin: int,
    output: Path | None = None,
    imports: ForkServer | None = None,
) -> Child:
    """Start a node's agent, tied to this thread.

    ``stdin`` is its lifeline; ``output`` is as in `Child.start`. The agent gets a fork server from
    ``imports``, if that can fork; then it is tied to this process's first thread.
    """
    name = f"{config.run}/{config.node}"
    if imports is not None and output is None:
        with contextlib.suppress(PeerError):
            return _branched(config, imports, name=name, env=env, stdin=stdin)
    return start_configured(
        _MODULE, config, name=name, tied=True, env=env, stdin=stdin, output=output
    )


def _branched(
    config: AgentConfig, imports: ForkServer, *, name: str, env: Mapping[str, str], stdin: int
) -> Child:
    config_fd, server_fd = imports.first_fd, imports.first_fd + 1
    inheriting = msgspec.structs.replace(config, fork_server=server_fd)
    with descriptor_of(msgspec.json.encode(inheriting)) as described:
        process = imports.branch(
            configured_argv(_MODULE, name=name, fd=config_fd),
            server_spec(config, env),
            env=env,
            stdin=stdin,
            config=described,
        )
    return Child(process)
