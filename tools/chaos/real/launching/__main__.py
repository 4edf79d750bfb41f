"""A launcher as a process of its own, for jobs that must outlive its death.

It reads its configuration from a file handle, and orders, one a line, from its standard input. It
writes replies to another handle: the run that it serves, the processes of a lost machine, and at
the end the job's outcome.
"""

from __future__ import annotations

import os
import sys
import threading

import msgspec

from holdfast.elastic.launch.local import Launcher
from holdfast.tools.chaos.real.launching.messages import (
    KILL,
    LOSE,
    RETURN,
    Ended,
    LaunchOrder,
    Lost,
    Reply,
    RunBegun,
    decoded,
)


def main(config_fd: int, replies_fd: int) -> int:
    """Run the job until its end, or as long as this process lives."""
    with os.fdopen(config_fd, "rb") as file:
        launcher = _launcher(decoded(file.read()))
    launcher.start()

    def reply(message: Reply) -> None:
        os.write(replies_fd, msgspec.json.encode(message) + b"\n")

    reply(RunBegun(run=launcher.run, coordinator=launcher.coordinator_address))

    def obey() -> None:
        for line in sys.stdin:
            order, _, node = line.strip().partition(" ")
            if order == KILL:
                launcher.kill()
            elif order == LOSE:
                reply(Lost(pids=tuple(launcher.lose_machine(node))))
            elif order == RETURN:
                launcher.return_machine(node)

    threading.Thread(target=obey, name="orders", daemon=True).start()
    outcome = launcher.wait()
    assert outcome is not None
    reply(Ended(outcome=outcome))
    return 0


def _launcher(order: LaunchOrder) -> Launcher:
    part = order.managed
    if part is None:
        return Launcher(order.config)
    from holdfast.elastic.launch.managed import ManagedLauncher  # needs the extra etcd

    return ManagedLauncher(order.config, part.joint, program=part.program)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
