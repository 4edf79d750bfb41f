"""``holdfast run``: run a script elastically on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from holdfast.elastic.agent.config import AgentTiming
from holdfast.elastic.agent.notice import NoticeConfig
from holdfast.elastic.coordinator.connecting import is_etcd, is_managed
from holdfast.elastic.coordinator.etcd.address import MANAGED, EtcdAddress
from holdfast.elastic.coordinator.managed.program import etcd_program
from holdfast.elastic.errors import ConfigError, CoordinatorError
from holdfast.elastic.events.log import EventReader
from holdfast.elastic.launch.config import (
    APART_TIMING,
    EMBEDDED,
    ETCD_TIMING,
    LOCAL_TIMING,
    LaunchConfig,
    NodeSpec,
    python_command,
)
from holdfast.elastic.launch.joint import JointLauncher
from holdfast.elastic.launch.local import Launcher
from holdfast.elastic.membership.records import TRAINER, JobOutcome
from holdfast.elastic.preload.program import PRELOAD_ENV, module_names
from holdfast.tools.beside.readers import Readers
from holdfast.tools.beside.readers import add_options as add_reader_options
from holdfast.tools.beside.readers import readers as wanted_readers
from holdfast.tools.commands import run_machines, run_settings
from holdfast.tools.printing import printable
from holdfast.tools.show.levels import Importance
from holdfast.tools.show.telling import StoryTeller
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive, positive_number

_EXAMPLES = """\
examples:
  holdfast run --nproc 4 train.py --epochs 3         four trainers on one node
  holdfast run --nproc 1 --nodes 3 train.py          three nodes of one: snapshots with parity
  holdfast run --nproc 2 --role rollout=2 rl.py      two trainers, two rollout workers
  holdfast run --nproc 4 -m package.training         a module, as python -m runs it

Arguments after the script go to the script. The job survives a SIGKILL of any worker.
"""
_RETURN_S = 600.0
_POLL_S = 0.1


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
        epilog=_EXAMPLES + run_machines.EXAMPLES,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=positive, default=1, metavar="N", help="trainers per node (default 1)")
    add("--nodes", type=positive, default=1, metavar="K", help="nodes (default 1)")
    add("--world", type=positive, metavar="W", help="trainers in all (default N times K)")
    run_machines.add_options(add)
    run_settings.add_roles(add)
    run_settings.add_options(add)
    add(
        "--preload",
        metavar="MODULE,...",
        help="import these modules once per node and fork the workers after that, as in "
        f"torch,transformers: a replacement starts in a tenth of a second (default: {PRELOAD_ENV}, "
        "else none; see docs/how-to/deploy.md)",
    )
    add("--run-dir", type=Path, metavar="DIR", help="keep events and logs in DIR")
    add(
        "--return-s",
        type=float,
        default=_RETURN_S,
        metavar="S",
        help="with --run-dir: if this command is killed, keep the snapshots in memory S seconds; "
        "the same command in DIR then continues the job, and other machines wait so long for its "
        "coordinator (default %(default)g; 0: nothing outlives the command)",
    )
    add(
        "--coordinator",
        default=EMBEDDED,
        metavar="URL",
        help="address of the coordinator (default: this command runs one). "
        "etcd://HOST:PORT[,HOST:PORT...] is an etcd, etcds:// one with TLS; options: "
        "docs/reference/dependencies.md. With --nnodes, HOST:PORT is a coordinator that the "
        "command on HOST runs for the others; with --run-dir it outlives that command. "
        "managed://HOST[:PORT] is an etcd that the commands run on their machines, three or more: "
        "the job outlives any of them",
    )
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
        help="write each worker's output to DIR/logs/SEAT.log instead of this terminal, each line "
        "behind its time; `holdfast logs DIR` shows it with the events",
    )
    add(
        "--max-attempts",
        type=positive,
        default=5,
        metavar="N",
        help="give up when a process failed N times in a row without a newly protected step "
        "(default 5)",
    )
    add(
        "--min-hang-s",
        type=positive_number,
        default=LOCAL_TIMING.min_hang_s,
        metavar="S",
        help="least seconds of silence before a worker counts as hung (default %(default)g)",
    )
    add(
        "--max-hang-s",
        type=positive_number,
        default=LOCAL_TIMING.max_hang_s,
        metavar="S",
        help="most seconds of silence before a worker counts as hung, whatever its steps take "
        "(default %(default)g)",
    )
    add(
        "--first-hang-s",
        type=positive_number,
        default=LOCAL_TIMING.first_hang_s,
        metavar="S",
        help="the same limit for the first step of a generation, which may compile (default "
        "%(default)g)",
    )
    add(
        "--pause-s",
        type=positive_number,
        default=LOCAL_TIMING.pause_s,
        metavar="S",
        help="the same limit outside training: while the worker builds or restores, or in a "
        "pause that the script announced (default %(default)g)",
    )
    add(
        "--notice-file",
        default="",
        metavar="FILE",
        help="a node leaves in order once FILE exists; {node} in FILE stands for the node's name",
    )
    add(
        "--notice-url",
        default="",
        metavar="URL",
        help="a node leaves in order once a GET of URL succeeds with a body other than FALSE or "
        "NONE; a request below EC2's /latest/meta-data/ carries a session token (IMDSv2)",
    )
    add(
        "--notice-header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a header of those requests, as in Metadata-Flavor=Google; repeatable. NAME=@FILE "
        "takes a secret value from a file: other users can read command lines",
    )
    add(
        "--grace-s",
        type=positive_number,
        default=NoticeConfig().grace_s,
        metavar="S",
        help="seconds from such a notice, or from an agent's SIGTERM, to the end of the node "
        "(default %(default)g)",
    )
    run_settings.add_story(add)
    add_reader_options(add)
    run_settings.add_module(add)
    add("script", metavar="SCRIPT", help="Python script to run, or after -- any of its arguments")
    add("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the job.

    Return 0 if it completed, 1 if it failed, 2 for a wrong call, 130 for Ctrl-C.
    """
    interrupts: _Interrupts | None = None
    teller = StoryTeller(form=args.log_format, least=Importance[args.log_level.upper()])
    told = None if args.quiet else teller
    try:
        readers = Readers(wanted_readers(args), say=partial(_remark, told))
        launcher = _launcher(args)
        interrupts = _Interrupts(launcher)
        launcher.start()
    except (ConfigError, CoordinatorError) as error:
        caught = interrupts.caught if interrupts else 0
        return _complain(teller, str(error), 128 + caught if caught else 2)
    if args.run_dir is None:
        where = f"run directory {launcher.run_dir}, removed at the end (--run-dir DIR keeps one)"
        _remark(told, where)
    readers.start(launcher.run_dir)
    outcome = _follow(launcher, told, readers)
    readers.close()
    if interrupts.caught:
        return _complain(teller, outcome.message, 128 + interrupts.caught)
    return 0 if outcome.ok else _complain(teller, outcome.message, 1)


def _launcher(args: argparse.Namespace) -> Launcher:
    joint = run_machines.joint_config(args)
    if joint is None:
        return Launcher(_config(args, returns=args.run_dir is not None))
    returns = args.run_dir is not None or is_etcd(joint.place.url)
    config = _config(args, machines=joint.most, returns=returns)
    if is_managed(joint.place.url):
        from holdfast.elastic.launch.managed import ManagedLauncher  # needs the extra etcd

        return ManagedLauncher(config, joint, program=etcd_program(args.etcd))
    return JointLauncher(config, joint)


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if args.module:
        return python_command("-m", [args.script, *args.args])
    script = Path(args.script)
    if not script.is_file():
        raise ConfigError(
            f"{script}: no such script (in {Path.cwd()}); give the path of the Python script to "
            "run, or -m and the name of a module"
        )
    return python_command(script, args.args)


def _config(
    args: argparse.Namespace, *, machines: int | None = None, returns: bool = False
) -> LaunchConfig:
    command = _command(args)
    if args.capture_output and args.run_dir is None:
        raise ConfigError("--capture-output needs --run-dir DIR: the output goes there")
    roles = dict(args.role)
    slots = {TRAINER: args.nproc, **roles}
    nodes = tuple(
        NodeSpec(name=f"node{i}", domain=domain, slots=slots)
        for i, domain in enumerate(run_machines.domains(args))
    )
    return LaunchConfig(
        command=command,
        nodes=nodes,
        wanted={TRAINER: args.world or args.nproc * args.nodes * (machines or 1), **roles},
        run_dir=args.run_dir,
        coordinator=_coordinator(args.coordinator),
        elsewhere=((machines or 1) - 1) * args.nodes,
        port=args.port,
        capture_output=args.capture_output,
        stamp_output=args.capture_output,
        history_bytes=args.history,
        settings=run_settings.settings(args),
        max_attempts=args.max_attempts,
        node_restarts=args.max_attempts,
        return_s=args.return_s if returns else 0.0,
        preload=_preload(args.preload),
        timing=msgspec.structs.replace(
            _timing(args, apart=machines is None and returns and args.return_s > 0),
            min_hang_s=args.min_hang_s,
            max_hang_s=max(args.min_hang_s, args.max_hang_s),
            first_hang_s=args.first_hang_s,
            pause_s=args.pause_s,
        ),
        notice=_notice(args),
    )


def _preload(given: str | None) -> tuple[str, ...]:
    if given is None:
        return module_names(os.environ.get(PRELOAD_ENV, ""), option=PRELOAD_ENV)
    return module_names(given)


def _timing(args: argparse.Namespace, *, apart: bool) -> AgentTiming:
    if is_etcd(args.join or args.coordinator) or args.coordinator == MANAGED:
        return ETCD_TIMING
    return APART_TIMING if apart else LOCAL_TIMING


def _coordinator(text: str) -> str:
    if is_etcd(text):
        EtcdAddress.parse(text)  # raises an error that names the fault
    return text


class _Interrupts:
    """Ctrl-C and SIGTERM stop the job cleanly; a second signal kills it."""

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


def _follow(launcher: Launcher, teller: StoryTeller | None, readers: Readers) -> JobOutcome:
    reader = EventReader(launcher.run_dir)
    while (outcome := launcher.wait(_POLL_S)) is None:
        _tell(teller, reader)
        readers.look()
    _tell(teller, reader)
    return outcome


def _tell(teller: StoryTeller | None, reader: EventReader) -> None:
    if teller is not None:
        for event in reader.new():
            for line in teller.lines(event):
                _say(line)


def _remark(teller: StoryTeller | None, text: str) -> None:
    if teller is not None:
        for line in teller.remark(text, time_s=time.time()):
            _say(line)


def _complain(teller: StoryTeller, message: str, status: int) -> int:
    _say(teller.outcome(message, time_s=time.time()))
    return status


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a reader who left must not end the job
        print(printable(line, lines=True), file=sys.stderr, flush=True)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def _notice(args: argparse.Namespace) -> NoticeConfig:
    try:
        return NoticeConfig(
            file=args.notice_file,
            url=args.notice_url,
            headers=dict(args.notice_header),
            grace_s=args.grace_s,
        )
    except ValueError as error:
        raise ConfigError(f"wrong option: {error}") from error


def _header(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE or NAME=@FILE")
    if value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{text!r}: cannot read the file: {error}") from error
    return name, value
