"""``python -m holdfast.elastic.agent --config-fd FD``: run a node's agent until stdin closes."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from holdfast.ckpt.descriptors import allow_many
from holdfast.elastic.agent.config import AgentConfig
from holdfast.elastic.agent.garbage import collect_rarely
from holdfast.elastic.agent.loop import Agent
from holdfast.elastic.errors import CoordinatorError

_log = logging.getLogger(__name__)


def main() -> int:
    """Parse the configuration and serve."""
    parser = argparse.ArgumentParser(prog="holdfast.elastic.agent", description=__doc__)
    parser.add_argument("--name", help="run and node, for a reader of the process list")
    parser.add_argument(
        "--config-fd", type=int, required=True, help="a descriptor of an AgentConfig as JSON"
    )
    with os.fdopen(parser.parse_args().config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=AgentConfig)
    logging.basicConfig(format=f"holdfast agent {config.node}: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_rarely()
    allow_many()
    try:
        return Agent(config).serve(lifeline=sys.stdin.fileno())
    except CoordinatorError as error:
        _log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
