"""The actor of a node: it runs the node's part of the job, and tells how it ended.

The class is a plain one; `holdfast.adapters.ray.placing` makes actors of it. Its methods run on
threads of the actor. The part itself runs on a thread of its own, with which the kernel ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.adapters.ray.child import ChildEnd, HoldfastRun, JobPlace, key_of
from holdfast.adapters.ray.draining import Drains
from holdfast.adapters.ray.job import RayJob, threads_of_a_worker
from holdfast.ckpt.errors import HoldfastError
from holdfast.elastic.errors import ConfigError

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """The Ray node of an actor: its id, and its address for the other nodes."""

    node: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOrder:
    """All that a node needs to run its part; it is sent to the actor and not stored by Ray.

    ``folder`` is the current one of the caller, empty if Ray copied a working directory.
    """

    job: RayJob
    place: JobPlace
    key: str = field(repr=False)
    folder: str
    env: Mapping[str, str]


class RayNode:
    """Runs ``holdfast run`` on one Ray node."""

    def __init__(self) -> None:
        import ray

        self._ray: Any = ray
        if threading.current_thread() is threading.main_thread():
            # Ray's own handler raises wherever the main thread is, and a traceback is printed
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._running: HoldfastRun | None = None
        self._end: ChildEnd | HoldfastError | OSError | None = None

    def place(self) -> NodePlace:
        """Return the node on which this actor is."""
        context = self._ray.get_runtime_context()
        return NodePlace(
            node=context.get_node_id(), address=_address(self._ray.util.get_node_ip_address())
        )

    def run(self, order: NodeOrder) -> ChildEnd:
        """Run the node's part to its end. Raises ``ConfigError``, ``OSError``."""
        _enter(order)
        found = self.place()
        running = self._running = HoldfastRun(
            order.job,
            key=key_of(order.key),
            say=_say,
            foretold=Drains(self._ray, found.node),
        )
        env = self._environment(order)

        def run() -> None:
            try:
                self._end = running.run(order.place, node=found.node, host=found.address, env=env)
            except (HoldfastError, OSError) as error:
                self._end = error

        thread = threading.Thread(target=run, name="holdfast-run")
        thread.start()
        thread.join()
        if isinstance(self._end, ChildEnd):
            return self._end
        raise self._end or RuntimeError("the thread of holdfast run ended without a word")

    def stop(self) -> None:
        """Ask the node's part to end in order."""
        if self._running is not None:
            self._running.stop()

    def leave(self) -> None:
        """Give the node a notice: it hands its state over and leaves."""
        if self._running is not None:
            self._running.leave()

    def _environment(self, order: NodeOrder) -> dict[str, str]:
        context = self._ray.get_runtime_context()
        declared = context.runtime_env.get("env_vars") or {}
        env = {**os.environ, **order.env}
        if THREADS not in declared and THREADS not in order.env:
            cpus = context.get_assigned_resources().get("CPU", 0.0)
            workers = order.job.nproc + sum(order.job.options.roles.values())
            env[THREADS] = threads_of_a_worker(env.get(THREADS, ""), cpus, workers)
        return env


def _enter(order: NodeOrder) -> None:
    """Go to the folder of the job; raise ``ConfigError`` if it or the script is not here."""
    here, script = socket.gethostname(), order.job.script
    remedy = (
        "give RayOptions(working_dir=...), which Ray copies to the nodes, or a folder that all "
        "nodes see at the same path"
    )
    if order.folder:
        try:
            os.chdir(order.folder)
        except OSError as error:
            raise ConfigError(f"{here}: {order.folder}: {error.strerror}; {remedy}") from error
    if not order.job.options.module and not Path(script).is_file():
        raise ConfigError(f"{here}: {Path.cwd() / script}: no such script; {remedy}")


def _address(found: str) -> str:
    if ":" in found:
        raise ConfigError(
            f"Ray has the address {found} for {socket.gethostname()}, and Holdfast does not speak "
            "IPv6: start Ray there with --node-ip-address and an IPv4 address"
        )
    return found


def _say(line: str) -> None:
    """Write a line to the actor's output, which Ray shows where the job was started."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
