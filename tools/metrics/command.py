"""`holdfast metrics`: a run's metrics for Prometheus, its alerts, its dashboard."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Final

from holdfast.elastic.errors import ConfigError
from holdfast.tools.beside.places import ServedPlace, place_of
from holdfast.tools.metrics.families import FAMILIES
from holdfast.tools.metrics.grafana import dashboard
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive_number
from holdfast.tools.terminal import print_json

_EVERY_S: Final = 5.0
"""Asking a node costs it and this machine some milliseconds of a processor."""

_NICE: Final = 10

_EPILOG: Final = """\
examples:
  holdfast run --run-dir runs/live --metrics 9400 train.py     serve them with the job
  holdfast metrics runs/live                                   print them once
  holdfast metrics runs/live --listen 9400                     serve them for a job that runs
  holdfast metrics --rules > /etc/prometheus/holdfast.yaml     alerts for Prometheus
  holdfast metrics --grafana > holdfast.json                   a dashboard to import in Grafana
  holdfast metrics --list                                      all metrics and their labels
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "metrics",
        help="serve a run's metrics for Prometheus, or print its alerts and Grafana's dashboard",
        description="Reads the events of a run and asks its sidecars, and gives the figures in "
        "Prometheus' format. The command does not disturb the training, which does not need it.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="the directory that `holdfast run --run-dir` got",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--listen",
        type=place_of,
        metavar="[HOST:]PORT",
        help="serve http://HOST:PORT/metrics until Ctrl-C (HOST: the loopback; port 0: any free)",
    )
    form.add_argument("--rules", action="store_true", help="print alert rules for Prometheus")
    form.add_argument("--grafana", action="store_true", help="print a dashboard for Grafana")
    form.add_argument("--list", action="store_true", help="print all metrics and their labels")
    add(
        "--every",
        type=positive_number,
        default=_EVERY_S,
        metavar="SECONDS",
        help="with --listen: read the run so often (default %(default)g)",
    )
    add("--beside", action="store_true", help=argparse.SUPPRESS)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was asked for, or serve until the command is ended."""
    if args.rules:
        print(rules(), end="")
    elif args.grafana:
        print_json(dashboard())
    elif args.list:
        for family in FAMILIES.values():
            labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
            print(f"{family.name}{labels} ({family.kind}): {family.about}")
    elif args.run_dir is None:
        raise ConfigError("give RUN_DIR, or one of --rules, --grafana and --list")
    else:
        _of_run(args.run_dir, args.listen, every_s=args.every, beside=args.beside)
    return 0


def rules() -> str:
    """Return the alert rules as YAML."""
    return files("holdfast.tools.metrics").joinpath("rules.yaml").read_text(encoding="utf-8")


def _of_run(run_dir: Path, place: ServedPlace | None, *, every_s: float, beside: bool) -> None:
    from holdfast.tools.metrics.exposition import exposition  # these need the extra metrics
    from holdfast.tools.metrics.reading import MetricsReader
    from holdfast.tools.metrics.server import serving

    reader = MetricsReader(run_dir)
    if place is None:
        reader.begin()
        print(exposition(reader.samples()), end="", flush=True)
        return
    with contextlib.suppress(OSError):
        os.nice(_NICE)  # training comes first
    with serving(place, reader.samples) as served:
        if not place.is_local:
            _say(
                f"warning: {served} is open to every machine that reaches it: the metrics tell "
                "names of nodes and the progress of the run"
            )
        _say(f"metrics of {run_dir} at http://{served}/metrics")
        try:
            reader.begin()
            while True:
                time.sleep(every_s)
                with contextlib.suppress(FileNotFoundError):  # a temporary directory at the end
                    reader.refresh()
        except KeyboardInterrupt:
            if not beside:  # the launcher ends it with the job
                raise


def _say(line: str) -> None:
    print(f"holdfast: {line}", file=sys.stderr, flush=True)
