"""``python -m holdfast.elastic.coordinator --config-fd FD``: serve a run's coordinator."""

from __future__ import annotations

import logging
import signal
import sys

from holdfast.ckpt.descriptors import allow_many, read_configuration
from holdfast.elastic.coordinator.service import Service, ServiceConfig
from holdfast.elastic.errors import CoordinatorError


def main() -> int:
    """Parse the configuration and serve."""
    config = read_configuration(
        ServiceConfig, prog="holdfast.elastic.coordinator", description=__doc__
    )
    logging.basicConfig(format="%(asctime)s holdfast coordinator: %(message)s")
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
