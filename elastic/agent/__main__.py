"""``python -m elastic.agent --config JSON``: run one node's agent; stdin is its lifeline."""

from __future__ import annotations

import argparse
import logging
import signal
import sys

import msgspec

from elastic.agent.config import AgentConfig
from elastic.agent.garbage import collect_rarely
from elastic.agent.loop import Agent


def main() -> int:
    """Parse the configuration and serve."""
    parser = argparse.ArgumentParser(prog="elastic.agent", description=__doc__)
    parser.add_argument("--config", required=True, help="an AgentConfig as JSON")
    config = msgspec.json.decode(parser.parse_args().config, type=AgentConfig)
    logging.basicConfig(format=f"holdfast agent {config.node}: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    collect_rarely()
    return Agent(config).serve(lifeline=sys.stdin.fileno())


if __name__ == "__main__":
    sys.exit(main())
