"""The `holdfast` command: one subcommand per module of this package, imported on first use.

A subcommand's module has ``add_parser(subparsers) -> ArgumentParser`` and ``run(args) -> int``.
Errors that a user can cause are printed as one paragraph on stderr, never as a traceback. Exit
codes: 0 done, 1 the work failed, 2 the command line is wrong, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Final, cast

from holdfast.ckpt.errors import HoldfastError, InternalError
from holdfast.elastic.errors import ConfigError
from holdfast.tools.printing import make_logs_printable
from holdfast.tools.settings.configured import CONFIGURED, add_option
from holdfast.tools.subcommand import Subcommand, Subparsers, report

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143


COMMANDS: Final = {
    "run": (
        "commands.run",
        "start a training script so that it survives the loss of workers",
    ),
    "ray": ("ray.command", "run a script on the nodes of a Ray cluster"),
    "check": (
        "commands.check",
        "find out in small whether a training script keeps the promise",
    ),
    "sidecar": (
        "commands.sidecar",
        "run one node's sidecar for a job that torchrun, Slurm or Kubernetes starts",
    ),
    "status": (
        "commands.status",
        "show how well a running job is protected, and the cost of it",
    ),
    "logs": ("logs.command", "print the history of a run in time order, and follow it"),
    "doctor": (
        "doctor.command",
        "find what would keep a job from running well, with the remedy",
    ),
    "top": (
        "top.command",
        "show a run in the terminal as it goes: nodes, protection, recoveries, messages",
    ),
    "metrics": (
        "metrics.command",
        "serve a run's metrics for Prometheus, or print its alerts and Grafana's dashboard",
    ),
    "traces": (
        "traces.command",
        "send a run's recoveries, checkpoints and joins as traces to an OTLP collector",
    ),
    "dashboard": (
        "dashboard.command",
        "show a run in the browser as it goes: nodes, recoveries, protection, checkpoints",
    ),
    "demo": (
        "demo.command",
        "train with reinforcement learning while processes are killed, and check the weights",
    ),
    "chaos": ("chaos.command", "inject faults into a training job and check the training"),
    "inspect": ("commands.inspect", "show the contents of a checkpoint"),
    "cat": (
        "commands.cat",
        "print a tensor, a slice of it, its statistics or a plain value",
    ),
    "diff": ("commands.diff", "show the differences between two checkpoints"),
    "verify": (
        "commands.verify",
        "check every byte of a checkpoint against its checksums",
    ),
    "reshard": ("commands.reshard", "rewrite a checkpoint for another layout"),
    "convert": ("commands.convert", "convert between formats of checkpoints"),
    "prune": (
        "commands.prune",
        "remove old checkpoints, but never the newest verified one",
    ),
    "islands": (
        "islands.command",
        "look at runs that merge their weights, and repeat their merges",
    ),
    "plan": ("plan.command", "forecast memory, losses, goodput and the best intervals of a job"),
    "init": (
        "settings.init_command",
        "write a commented holdfast.toml, and a job file for the launcher at hand",
    ),
    "settings": ("settings.command", "show each setting, its value and its origin"),
    "completion": (
        "settings.completion",
        "print the completion of commands and options for a shell",
    ),
    "bench": (
        "bench.command",
        "measure snapshots, checkpoints and parity on this machine",
    ),
}
"""Subcommand -> (module below `holdfast.tools`, one line of help)."""

OF_ALL: Final = ("settings", "init", "completion")
"""Subcommands that look at the parsers of all, which `whole_parser` makes."""

OURS: Final = "holdfast"

EXTRA_OF: Final = {
    "accelerate": "hf",
    "aetcd": "etcd",
    "boto3": "s3",
    "botocore": "s3",
    "datasets": "trl",
    "google": "etcd",
    "grpc": "etcd",
    "lightning": "lightning",
    "httpx2": "engines",
    "mlflow": "mlflow",
    "obstore": "obstore",
    "opentelemetry": "otel",
    "peft": "trl",
    "prometheus_client": "metrics",
    "ray": "ray",
    "reasoning_gym": "rl",
    "sse_starlette": "dashboard",
    "starlette": "dashboard",
    "tensorboard": "tensorboard",
    "textual": "top",
    "torchdata": "data",
    "torchtitan": "torchtitan",
    "transformers": "hf",
    "trl": "trl",
    "urllib3": "s3",
    "uvicorn": "dashboard",
    "wandb": "wandb",
}
"""Optional package, as it is imported -> the extra of Holdfast's distribution that installs it."""

_REMEDIES: Final = {
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file: check the path",
    errno.EISDIR: "a file was needed: check the path",
    errno.EACCES: "change the permissions or choose another place",
    errno.EPERM: "change the permissions or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.ENOSPC: "make room there or choose another place; nothing committed earlier is harmed",
    errno.EDQUOT: "make room there or choose another place; nothing committed earlier is harmed",
    errno.EADDRINUSE: "another program listens there: stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine does not have that address: choose one it has",
    errno.ENOMEM: "free memory, or keep fewer snapshots",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ELOOP: "links lead in a circle: check the path",
}


def installed_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("holdfast")
    except PackageNotFoundError:
        return "unknown (not installed)"


def load(command: str | None) -> Subcommand | None:
    """Import the module of ``command``; None if there is no such command."""
    if command not in COMMANDS:
        return None
    return cast("Subcommand", importlib.import_module(f"holdfast.tools.{COMMANDS[command][0]}"))


def build_parser(chosen: str | None, subcommand: Subcommand | None) -> argparse.ArgumentParser:
    """Return the command line's parser, complete for the chosen subcommand only."""
    return _parser({chosen: subcommand} if chosen and subcommand else {})


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser that is complete for all subcommands; it imports all of them.

    One whose package is not installed stays without arguments.
    """
    found = {}
    for name in COMMANDS:
        try:
            found[name] = load(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == OURS:
                raise
    return _parser({name: each for name, each in found.items() if each})


def _parser(complete: Mapping[str, Subcommand]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast",
        description="Keeps PyTorch training alive: parity-guarded in-memory snapshots, universal "
        "checkpoints, in-place elasticity.",
        epilog="`holdfast COMMAND --help` explains a command. Exit codes: 0 done, 1 failed, "
        "2 wrong command line, 130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"holdfast {installed_version()}")
    subparsers = cast(
        "Subparsers", parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    )
    for name, (_, summary) in COMMANDS.items():
        if name in complete:
            add_option(name, complete[name].add_parser(subparsers))
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def parsed(
    command: str | None, subcommand: Subcommand | None, words: Sequence[str]
) -> argparse.Namespace:
    """Return the arguments, with the settings of `holdfast.toml` for a command that has some."""
    parser = build_parser(command, subcommand)
    if command in OF_ALL:
        parser.set_defaults(whole=whole_parser)
    if command not in CONFIGURED:
        return parser.parse_args(words)
    from holdfast.tools.settings import apply  # it imports what `holdfast --help` does without

    return apply.parse(parser, words, COMMANDS)


def missing_package(error: ModuleNotFoundError, command: str | None) -> str:
    """Return the message for a user who lacks the package that ``error`` names."""
    package = (error.name or "?").partition(".")[0]
    extra = EXTRA_OF.get(package)
    remedy = f"pip install 'holdfast[{extra}]'" if extra else f"pip install {package}"
    return f"`holdfast {command}` needs the package {package}, which is not installed: {remedy}"


def describe_os_error(error: OSError) -> str:
    """Return the file, the system's message, and a remedy."""
    if error.errno is None:
        return str(error)
    found = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    text = f"{found}: {error.strerror}" if found else str(error.strerror)
    remedy = _REMEDIES.get(error.errno)
    return f"{text}; {remedy}" if remedy else text


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. As with Ctrl-C, unfinished work is cleaned up on the way out."""


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Raise `Terminated` on SIGTERM until the end of the block, and let no other error hide it.

    Code that an interrupt passes through may raise an error of its own in its place (torch's zip
    writer does). This block raises the interrupt instead of that error.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except Exception as error:
        behind = error.__context__
        while behind is not None and not isinstance(behind, KeyboardInterrupt):
            behind = behind.__context__
        if behind is None:
            raise
        raise behind from None
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    make_logs_printable()
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        subcommand = load(chosen)
        args = parsed(chosen, subcommand, words)
        with terminated_in_order():
            return subcommand.run(args) if subcommand else EXIT_USAGE
    except Terminated:
        print("terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe early: `holdfast inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == OURS:
            raise
        report(missing_package(error, chosen))
    except InternalError:
        raise
    except ConfigError as error:
        report(str(error))
        return EXIT_USAGE
    except HoldfastError as error:
        report(str(error) or type(error).__name__)
    except OSError as error:
        report(describe_os_error(error))
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
