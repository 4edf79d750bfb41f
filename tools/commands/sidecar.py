"""``holdfast sidecar``: run a separate sidecar beside torchrun, Slurm or Kubernetes."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from holdfast.ckpt.descriptors import readable
from holdfast.ckpt.errors import HoldfastError, UnsafePathError
from holdfast.ckpt.memory.arena import arena_path, sweep
from holdfast.ckpt.private import plain_name
from holdfast.ckpt.sidecar.launch import SidecarProcess, start_sidecar
from holdfast.elastic.addresses import checked_host
from holdfast.elastic.channel.shared_key import KEY_FILE_ENV, shared_key, shared_key_file
from holdfast.elastic.channel.sidecar_file import (
    DOMAIN_ENV,
    SidecarFile,
    check_domain,
    sidecar_file,
)
from holdfast.elastic.channel.surroundings import SIDECAR_ENV
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.processes.children import end_processes
from holdfast.elastic.processes.run_dirs import temporary_place
from holdfast.elastic.rendezvous.link import address_towards
from holdfast.tools.printing import printable
from holdfast.tools.subcommand import HelpFormatter, Subparsers

RUN_ENV: Final = "HOLDFAST_RUN"
NODE_ENV: Final = "HOLDFAST_NODE"
_START_S = 150.0
_STOP_S = 15.0
_RESTART_PAUSE_S = 0.5
_POLL_S = 0.05

_EXAMPLES = """\
beside torchrun, on every node:
  eval "$(holdfast sidecar start --run myjob --host auto)"
  torchrun --nnodes=2 --nproc-per-node=8 ... train.py
  holdfast sidecar stop --run myjob

as a container of its own (see docs/deploy):
  holdfast sidecar serve --run "$JOB" --host auto --file /shared/sidecar.json

The script finds the sidecar by the file that HOLDFAST_SIDECAR names. When the launcher restarts the
script's processes, they resume from the newest snapshot in the sidecars' memory. All nodes of a job
need the same --run and the same key file. A sidecar serves one job: stop it before another begins.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "sidecar",
        help="run one node's sidecar for a job that torchrun, Slurm or Kubernetes starts",
        description="Run one node's sidecar by itself. It keeps the snapshots of a script that "
        "another launcher starts and restarts.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "action",
        choices=("start", "serve", "stop", "key"),
        help="start: in the background, and print what a shell is to export; serve: in the "
        "foreground until SIGTERM; stop: end it and drop its memory; key: make the key file",
    )
    add(
        "--run",
        metavar="NAME",
        help=f"the job's name, the same on all nodes (default: {RUN_ENV}, SLURM_JOB_ID, 'job')",
    )
    add("--node", metavar="NAME", help=f"this node's name (default: {NODE_ENV}, the host's name)")
    add(
        "--domain",
        metavar="NAME",
        help="the node's failure domain, such as a rack, or ROW/RACK for a rack in a wider domain "
        f"(default: {DOMAIN_ENV}, itself)",
    )
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="this node's address for the other nodes; 'auto': the one on the default route "
        "(default %(default)s: one machine only)",
    )
    add(
        "--file",
        metavar="FILE",
        help=f"file in which the script finds the sidecar's address (default: {SIDECAR_ENV}, a "
        "file of the user's own)",
    )
    add(
        "--key-file",
        metavar="FILE",
        help=f"file with the job's key, the same on all nodes (default: {KEY_FILE_ENV}, "
        "~/.config/holdfast/key.json); created if missing",
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep the sidecar's messages in DIR/logs")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do the action; 0 if it succeeds."""
    if args.action == "key":
        return _make_key(shared_key_file(args.key_file))
    name = args.run or _default_run(os.environ)
    node = args.node or os.environ.get(NODE_ENV) or socket.gethostname()
    try:
        plain_name(name, "--run")
        plain_name(node, "--node")
    except UnsafePathError as error:
        raise ConfigError(str(error)) from error
    path = sidecar_file(args.file, run=name, node=node)
    if args.action == "stop":
        return _stop(path)
    if args.action == "start":
        return _start(args, path)
    return _serve(args, path, run=name, node=node)


def _make_key(path: Path) -> int:
    shared_key(path)
    print(path)
    return 0


def _default_run(environment: Mapping[str, str]) -> str:
    job = environment.get("SLURM_JOB_ID")
    return environment.get(RUN_ENV) or (f"slurm-{job}" if job else "job")


def _domain(args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    if args.domain is not None:
        return check_domain(args.domain, "--domain")
    given = environment.get(DOMAIN_ENV)
    return check_domain(given, DOMAIN_ENV) if given else ""


# -- serve -----------------------------------------------------------------------------------------


def _serve(args: argparse.Namespace, path: Path, *, run: str, node: str) -> int:
    """Keep a sidecar running until a signal; a new one takes over the memory of its predecessor."""
    domain = _domain(args, os.environ)
    key_file = shared_key_file(args.key_file)
    shared_key(key_file)
    before_it = _refuse_second(path)
    path.unlink(missing_ok=True)  # left by a killed keeper: scripts would connect to nothing
    address = before_it.address if before_it and before_it.run == run else ""
    auto = args.host == "auto"
    host = address_towards("192.0.2.1") if auto else checked_host(args.host, given="--host")
    with _ending() as ended:
        sidecar: SidecarProcess | None = None
        try:
            while not ended.is_set():
                before = sidecar
                sidecar = start_sidecar(
                    run=run,
                    node=node,
                    key_file=key_file,
                    run_dir=args.log_dir,
                    host=host,
                    port=_port_of(address),
                )
                address = sidecar.address
                if before:
                    before.release()
                SidecarFile(
                    run=run,
                    node=node,
                    domain=domain,
                    address=sidecar.address,
                    key_file=str(key_file),
                    pid=os.getpid(),
                ).write(path)
                _tell(f"sidecar of {node} in {run} serves at {sidecar.address}; {path}")
                if not _await_end(sidecar, ended):
                    _tell(f"the sidecar ended with {sidecar.process.returncode}; starting another")
                    ended.wait(_RESTART_PAUSE_S)
        finally:
            path.unlink(missing_ok=True)
            if sidecar:
                sidecar.stop()
    return 0


def _port_of(address: str) -> int:
    """Return the port that a successor must reuse, because peers know it; 0 for any port."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdecimal() else 0


def _refuse_second(path: Path) -> SidecarFile | None:
    """Return the file of a sidecar that has ended; raise ``ConfigError`` if its keeper is alive."""
    try:
        found = SidecarFile.read(path)
    except ConfigError:
        return None  # no file, or an unreadable one
    if found.pid != os.getpid() and _is_keeper(found.pid):  # containers reuse process ids
        raise ConfigError(
            f"{path}: process {found.pid} already runs this sidecar; `holdfast sidecar stop` "
            "ends it, and another --node or --file starts a second one"
        )
    return found


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _await_end(sidecar: SidecarProcess, ended: threading.Event) -> bool:
    """Wait for a signal (True) or the end of the sidecar (False)."""
    pidfd = os.pidfd_open(sidecar.pid)
    try:
        while not ended.is_set():
            if readable([pidfd], _POLL_S):
                sidecar.process.wait()
                return False
        return True
    finally:
        os.close(pidfd)


# -- start and stop --------------------------------------------------------------------------------


def _start(args: argparse.Namespace, path: Path) -> int:
    """Start `serve` in a session of its own and return once it serves."""
    _refuse_second(path)
    argv = [
        sys.executable,
        "-P",
        "-m",
        "holdfast.tools.cli",
        "sidecar",
        "serve",
        "--file",
        str(path),
    ]
    for option in ("run", "node", "domain", "host", "key_file", "log_dir"):
        if value := getattr(args, option):
            argv += [f"--{option.replace('_', '-')}", str(value)]
    # not a pipe, which would break when this process ends
    with tempfile.TemporaryFile(dir=temporary_place()) as output:
        keeper = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        deadline_s = time.monotonic() + _START_S
        while not _serves(path, keeper.pid):
            if keeper.poll() is not None:
                output.seek(0)
                raise HoldfastError(f"the sidecar did not start: {output.read().decode().strip()}")
            if time.monotonic() > deadline_s:
                keeper.kill()
                raise HoldfastError(f"the sidecar did not start within {_START_S:g} s")
            time.sleep(_POLL_S)
    print(f"export {SIDECAR_ENV}={shlex.quote(str(path))}")
    return 0


def _serves(path: Path, keeper: int) -> bool:
    try:
        return SidecarFile.read(path).pid == keeper
    except ConfigError:
        return False


def _stop(path: Path) -> int:
    """End the keeper and with it the sidecar, and wait until both have ended."""
    found = SidecarFile.read(path)
    if not _is_keeper(found.pid):
        path.unlink(missing_ok=True)
        swept = sweep(exactly=arena_path(found.run, found.node).name)
        _tell(f"it had ended already; {len(swept)} arenas removed")
        return 0
    pidfd = os.pidfd_open(found.pid)
    try:
        os.kill(found.pid, signal.SIGTERM)
        gone = readable([pidfd], _STOP_S)
    finally:
        os.close(pidfd)
    if not gone:
        end_processes([found.pid], mark="sidecar")
        raise HoldfastError(f"process {found.pid} did not end within {_STOP_S:g} s and was killed")
    return 0


def _is_keeper(pid: int) -> bool:
    """True if the process is alive and is a keeper: the system reuses process ids."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"sidecar" in command and b"serve" in command


def _tell(line: str) -> None:
    print(printable(f"holdfast: {line}", lines=True), file=sys.stderr, flush=True)
