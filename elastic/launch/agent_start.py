"""The start of a node's agent, with its configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.run_folder import KEY
from holdfast.elastic.processes.children import Child


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
        max_attempts=config.max_attempts,
        settings=dict(config.settings),
        timing=config.timing,
        notice=config.notice,
        host=config.host,
        memory_of=node.name if config.apart else "",
    )


def start_agent(
    config: AgentConfig, *, env: Mapping[str, str], stdin: int, output: Path | None = None
) -> Child:
    """Start a node's agent, tied to this thread; ``-P`` keeps the user's directory off its path.

    ``stdin`` is its lifeline; ``output`` is as in `Child.start`.
    """
    with os.fdopen(os.memfd_create("holdfast-config"), "w+b") as file:
        file.write(msgspec.json.encode(config))
        file.seek(0)
        argv = (sys.executable, "-P", "-m", "holdfast.elastic.agent")
        options = ("--name", f"{config.run}/{config.node}", "--config-fd", str(file.fileno()))
        return Child.start(
            (*argv, *options),
            env=env,
            tied=True,
            stdin=stdin,
            output=output,
            pass_fds=(file.fileno(),),
        )
