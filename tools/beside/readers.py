"""The options of readers beside a job, and their processes.

A reader is a process of its own with a low priority. It reads the event files and asks the
sidecars, as `holdfast metrics` and `holdfast traces` do by hand. The job never waits for it while
it trains, and goes on without it if it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from holdfast.elastic.errors import ConfigError
from holdfast.elastic.processes.children import Child, describe_exit
from holdfast.tools.beside.collector import collector_url
from holdfast.tools.beside.places import ServedPlace, place_of

_END_S: Final = 8.0
_LOOK_S: Final = 2.0


class BesideReader(NamedTuple):
    """A reader by its name and the words of its command, of which the run directory is one."""

    name: str
    words: tuple[str, ...]
    ends_itself: bool


RUN_DIR: Final = "RUN_DIR"
"""Stands for the run directory among a reader's words."""


def add_options(add: Callable[..., Any]) -> None:
    """Declare the options; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "--metrics",
        type=place_of,
        metavar="[HOST:]PORT",
        help="serve the metrics of this command's nodes for Prometheus at http://HOST:PORT/metrics "
        "(HOST: the loopback), from a process that the job does not need",
    )
    add(
        "--otlp",
        metavar="URL",
        help="send recoveries, checkpoints and joins as traces to the OTLP/HTTP collector at URL, "
        "as in http://localhost:4318, from a process that the job does not need; needs --run-dir",
    )


def readers(args: argparse.Namespace) -> tuple[BesideReader, ...]:
    """Return the readers that the command line asks for.

    Raises ``ConfigError`` for a bad address, ``ModuleNotFoundError`` for a missing extra, and
    ``OSError`` for a port that is taken.
    """
    found = []
    if args.metrics is not None:
        place: ServedPlace = args.metrics
        if find_spec("prometheus_client") is None:
            raise ModuleNotFoundError(
                "No module named 'prometheus_client'", name="prometheus_client"
            )
        _check_free(place)
        words = ("metrics", RUN_DIR, "--listen", str(place), "--beside")
        found.append(BesideReader("metrics", words, ends_itself=False))
    if args.otlp is not None:
        url = collector_url(args.otlp)
        if args.run_dir is None:
            raise ConfigError("--otlp needs --run-dir DIR: the traces come from the events there")
        words = ("traces", RUN_DIR, "--otlp", url, "--beside")
        found.append(BesideReader("traces", words, ends_itself=True))
    return tuple(found)


class Readers:
    """The processes of readers; ``say`` gets a line for one that ends before the job."""

    def __init__(self, wanted: tuple[BesideReader, ...], *, say: Callable[[str], None]) -> None:
        self._wanted, self._say = wanted, say
        self._children: list[tuple[BesideReader, Child]] = []
        self._look_s = 0.0

    def start(self, run_dir: Path) -> None:
        """Start them; they end with the thread that calls this."""
        for reader in self._wanted:
            words = [str(run_dir) if word is RUN_DIR else word for word in reader.words]
            argv = (sys.executable, "-P", "-m", "holdfast.tools.cli", *words)
            try:
                child = Child.start(argv, env=os.environ, tied=True)
            except OSError as error:
                self._say(f"{reader.name} cannot be started, the job goes on: {error}")
                continue
            self._children.append((reader, child))

    def look(self) -> None:
        """Name those that have ended, every few seconds."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + _LOOK_S
        for reader, child in [*self._children]:
            if child.poll() is not None and child.code is not None:
                self._children.remove((reader, child))
                if not (reader.ends_itself and child.code == 0):
                    how = describe_exit(child.code)
                    self._say(f"{reader.name} ended ({how}); the job goes on without it")

    def close(self) -> None:
        """End them: those that have something left to send get a few seconds for it."""
        deadline_s = time.monotonic() + _END_S
        for reader, child in self._children:
            if not reader.ends_itself:
                child.signal(signal.SIGTERM)
        for _, child in self._children:
            if child.wait(max(deadline_s - time.monotonic(), 0.1)) is None:
                child.kill()
                child.wait(1.0)
        self._children.clear()


def _check_free(place: ServedPlace) -> None:
    """Raise ``OSError`` naming the place if it cannot be served at."""
    if not place.port:
        return
    try:
        socket.create_server((place.host, place.port), family=place.family).close()
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), f"--metrics {place}") from error
