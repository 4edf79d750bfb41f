"""The start of a node's agent, with its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.launch.config import LaunchConfig, NodeSpec
from holdfast.elastic.launch.run_folder import KEY
from holdfast.elastic.processes.children import Child
from holdfast.elastic.processes.configured import start_configured


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
        preload=config.preload,
    )


def start_agent(
    config: AgentConfig, *, env: Mapping[str, str], stdin: int, output: Path | None = None
) -> Child:
    """Start a node's agent, tied to this thread.

    ``stdin`` is its lifeline; ``output`` is as in `Child.start`.
    """
    name = f"{config.run}/{config.node}"
    return start_configured(
        "holdfast.elastic.agent", config, name=name, tied=True, env=env, stdin=stdin, output=output
    )
