"""``holdfast run``: make a script elastic on this machine."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import msgspec

from ckpt.types import Json
from elastic.config import Settings
from elastic.errors import ConfigError, ElasticError
from elastic.events import EventReader
from elastic.launch import LOCAL_TIMING, LaunchConfig, Launcher, NodeSpec, python_command
from elastic.records import TRAINER, Outcome
from tools.narrate import Narrator

_EXAMPLES = """\
examples:
  holdfast run --nproc 4 train.py --epochs 3         four trainers on one node
  holdfast run --nproc 1 --nodes 3 train.py          three nodes of one: snapshots with parity
  holdfast run --nproc 2 --role rollout=2 rl.py      two trainers, two rollout workers

Everything behind the script goes to the script. SIGKILL what you like: the job goes on.
"""
_POLL_S = 0.1


class Subparsers(Protocol):
    """What ``ArgumentParser.add_subparsers`` returns, as far as it is needed here."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add and return the parser of one subcommand."""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "run",
        help="run a script with workers that may die, hang, leave and join",
        description=(
            "Start workers that run SCRIPT, with a coordinator, and per node an agent and a "
            "sidecar that keeps the snapshots. A worker that dies, hangs or is stopped is "
            "replaced; the others go on from the newest complete step without being restarted."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=_positive, default=1, metavar="N", help="trainers per node (default 1)")
    add("--nodes", type=_positive, default=1, metavar="K", help="nodes (default 1)")
    add("--world", type=_positive, metavar="W", help="trainers in all (default N times K)")
    add(
        "--role",
        type=_role,
        action="append",
        default=[],
        metavar="NAME=N",
        help="N workers of another role beside the trainers; may be repeated",
    )
    add(
        "--parity",
        type=_parity,
        metavar="M",
        help="nodes that may be lost with their memory, or 'replicate' for whole copies "
        "(default: what the script says)",
    )
    add(
        "--parity-group",
        type=_positive,
        metavar="N",
        help="preferred number of nodes that guard each other (default: what the script says)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="host memory a node may spend on snapshots, as in 12GiB (default: no limit)",
    )
    add(
        "--checkpoint-bandwidth",
        metavar="RATE",
        help="what a node may write of checkpoints, as in 500MB/s (default: no limit)",
    )
    add(
        "--on-checkpoint-error",
        choices=("retry", "skip", "stop"),
        help="when a checkpoint cannot be written: try again and end the job only after several, "
        "never end it, or end it at once (default: what the script says)",
    )
    add(
        "--disk",
        metavar="DIR",
        help="spill snapshots to DIR on every node's own disk, and go on from what is there",
    )
    add(
        "--stop-grace-s",
        type=float,
        metavar="S",
        help="on SIGTERM take up to S seconds to save the newest protected step (default 0)",
    )
    add("--run-dir", type=Path, metavar="DIR", help="keep events and logs in DIR")
    add(
        "--port",
        type=_port,
        default=0,
        metavar="P",
        help="port of the coordinator on the loopback address (default: any free one)",
    )
    add(
        "--capture-output",
        action="store_true",
        help="write each worker's output to DIR/logs/SEAT.log instead of this terminal",
    )
    add(
        "--max-attempts",
        type=_positive,
        default=5,
        metavar="N",
        help="give up when a worker failed N times in a row without progress (default 5)",
    )
    add(
        "--min-hang-s",
        type=_seconds,
        default=LOCAL_TIMING.min_hang_s,
        metavar="S",
        help="never call a worker hung before S seconds of silence (default %(default)g)",
    )
    add("--quiet", action="store_true", help="no progress lines on stderr")
    add("script", metavar="SCRIPT", help="Python script to run, or after -- any of its arguments")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the job; 0 when it completed, 1 when it failed, 2 for a wrong call, 130 for Ctrl-C."""
    try:
        launcher = Launcher(_config(args))
        interrupts = _Interrupts(launcher)
        launcher.start()
    except ElasticError as error:
        return _complain(str(error), 2)
    outcome = _follow(launcher, Narrator(quiet=args.quiet))
    if interrupts.caught:
        return _complain(outcome.message, 128 + interrupts.caught)
    return 0 if outcome.ok else _complain(outcome.message, 1)


def _settings(args: argparse.Namespace) -> dict[str, Json]:
    """Return the settings of the script that the command line overrides."""
    given: dict[str, Json] = {
        "parity": args.parity,
        "parity_group": args.parity_group,
        "memory": args.memory,
        "checkpoint_bandwidth": args.checkpoint_bandwidth,
        "on_checkpoint_error": args.on_checkpoint_error,
        "disk": args.disk,
        "stop_grace_s": args.stop_grace_s,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    try:
        Settings(**settings)
    except ConfigError as error:
        raise ConfigError(f"wrong option: {error}") from error
    return settings


def _config(args: argparse.Namespace) -> LaunchConfig:
    script = Path(args.script)
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such script (in {Path.cwd()}); give the path of the Python script to run"
        )
    if args.capture_output and args.run_dir is None:
        raise ConfigError("--capture-output needs --run-dir DIR: that is where the output goes")
    roles = dict(args.role)
    slots = {TRAINER: args.nproc, **roles}
    nodes = tuple(
        NodeSpec(name=f"node{i}", domain=f"node{i}", slots=slots) for i in range(args.nodes)
    )
    return LaunchConfig(
        command=python_command(script, args.args),
        nodes=nodes,
        wanted={TRAINER: args.world or args.nproc * args.nodes, **roles},
        run_dir=args.run_dir,
        port=args.port,
        capture_output=args.capture_output,
        settings=_settings(args),
        max_attempts=args.max_attempts,
        node_restarts=args.max_attempts,
        timing=msgspec.structs.replace(LOCAL_TIMING, min_hang_s=args.min_hang_s),
    )


class _Interrupts:
    """Ctrl-C and SIGTERM end the job in order; the second one ends it at once."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self.caught = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.caught:
            self._launcher.kill()
            return
        self.caught = number
        self._launcher.stop(f"stopped by {signal.Signals(number).name}")


def _follow(launcher: Launcher, narrator: Narrator) -> Outcome:
    reader = EventReader(launcher.run_dir)
    while (outcome := launcher.wait(_POLL_S)) is None:
        _tell(narrator, reader)
    _tell(narrator, reader)
    return outcome


def _tell(narrator: Narrator, reader: EventReader) -> None:
    for event in reader.new():
        for line in narrator.lines(event):
            print(f"holdfast: {line}", file=sys.stderr, flush=True)


def _complain(message: str, status: int) -> int:
    print(f"holdfast: {message}", file=sys.stderr, flush=True)
    return status


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def _parity(text: str) -> int | str:
    if text != "replicate" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes, nor 'replicate'")
    return text if text == "replicate" else int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds


def _role(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name.isidentifier() or name == TRAINER:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give NAME=N with a name other than {TRAINER!r}, as in rollout=2"
        )
    return name, _positive(count)
