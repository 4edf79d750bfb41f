"""``python -m holdfast.elastic.coordinator --config-fd FD``: serve a run's coordinator."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from holdfast.ckpt.descriptors import allow_many
from holdfast.elastic.coordinator.service import Service, ServiceConfig
from holdfast.elastic.errors import CoordinatorError


def main() -> int:
    """Parse the configuration and serve."""
    parser = argparse.ArgumentParser(prog="holdfast.elastic.coordinator", description=__doc__)
    parser.add_argument("--name", help="the run, for a reader of the process list")
    parser.add_argument(
        "--config-fd", type=int, required=True, help="a descriptor of a ServiceConfig as JSON"
    )
    with os.fdopen(parser.parse_args().config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=ServiceConfig)
    logging.basicConfig(format="%(asctime)s holdfast coordinator: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    allow_many()
    try:
        service = Service(config)
    except (CoordinatorError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: service.stopped.set())
    service.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
