"""``python -m holdfast.elastic.agent --config-fd FD``: run a node's agent until stdin closes."""

from __future__ import annotations

import logging
import sys

from holdfast.ckpt.descriptors import allow_many, read_configuration
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.loop import Agent
from holdfast.elastic.errors import CoordinatorError
from holdfast.elastic.processes.garbage import collect_rarely

_log = logging.getLogger(__name__)


def main() -> int:
    """Parse the configuration and serve."""
    config = read_configuration(AgentConfig, prog="holdfast.elastic.agent", description=__doc__)
    logging.basicConfig(format=f"holdfast agent {config.node}: %(message)s")
    collect_rarely()
    allow_many()
    try:
        return Agent(config).serve(lifeline=sys.stdin.fileno())
    except CoordinatorError as error:
        _log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
