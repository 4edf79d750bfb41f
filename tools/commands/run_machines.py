"""The options of ``holdfast run`` for several launchers of one job, one per machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.elastic.addresses import checked_host
from holdfast.elastic.channel.shared_key import KEY_FILE_ENV, shared_key_file
from holdfast.elastic.channel.sidecar_file import DOMAIN_ENV, check_domain
from holdfast.elastic.channel.slurm import SlurmStep
from holdfast.elastic.coordinator.connecting import is_etcd, is_managed
from holdfast.elastic.coordinator.etcd.address import MANAGED
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.launch.config import EMBEDDED
from holdfast.elastic.launch.joint import JOIN_S, JointConfig
from holdfast.elastic.rendezvous.link import CoordinatorPlace

EXAMPLES = """
on several machines, with the same key file on all of them (a shared home does it):
  holdfast run --nnodes 2 --coordinator head:29400 --nproc 8 train.py     on both
  holdfast run --join head:29400 --nproc 8 train.py                       on a third, later
  holdfast run --nnodes 2:8 --coordinator etcd://e1,e2,e3 --nproc 8 train.py
  holdfast run --nnodes 3 --coordinator managed://head --nproc 8 train.py
  srun --ntasks-per-node=1 holdfast run --nproc 8 train.py                under Slurm
"""
_LEAST_MANAGED = 3
_BY_MACHINE = ("nnodes", "node_rank", "join", "job", "key_file", "join_timeout_s")


def add_options(add: Callable[..., Any]) -> None:
    """Declare the options; ``add`` is ``ArgumentParser.add_argument``."""
    add(
        "--nnodes",
        metavar="N|MIN:MAX",
        help="number of machines, each with its own `holdfast run`: the job waits for MIN and "
        "uses at most MAX (under srun: one per task)",
    )
    add(
        "--node-rank",
        type=int,
        metavar="R",
        help="this machine's number (default: any free one; under srun the task's)",
    )
    add(
        "--join",
        metavar="ADDRESS",
        help="join the job whose coordinator is at HOST:PORT or etcd://...; never start one",
    )
    add(
        "--host",
        metavar="ADDRESS",
        help="this machine's address for the others (default: detected)",
    )
    add(
        "--domain",
        metavar="NAME[,NAME...]",
        help="failure domain of this launcher's nodes, such as a rack, or ROW/RACK for a rack in a "
        "wider domain: one name for all of them, or one for each (default: "
        f"{DOMAIN_ENV}; else the machine if there are several, else each node by itself)",
    )
    add(
        "--etcd",
        metavar="FILE",
        default="",
        help="the etcd program for --coordinator managed (default: HOLDFAST_ETCD; else the one "
        "on the PATH)",
    )
    add("--job", metavar="NAME", help="the job's name at the coordinator (default: 'job')")
    add(
        "--key-file",
        metavar="FILE",
        help="file with the key that admits launchers, the same on all machines (default: "
        f"{KEY_FILE_ENV}, ~/.config/holdfast/key.json); created if missing",
    )
    add(
        "--join-timeout-s",
        type=float,
        metavar="S",
        help="wait up to S seconds for the coordinator and the other machines (default 600)",
    )


def joint_config(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> JointConfig | None:
    """Return the settings for joining other launchers, None if this launcher is the only one.

    Raises ``ConfigError`` for options that contradict each other.
    """
    step = SlurmStep.of(environment)
    is_given = any(getattr(args, name) is not None for name in _BY_MACHINE)
    if not is_given and (step is None or step.tasks == 1):
        if args.coordinator == MANAGED or is_managed(args.coordinator):
            raise ConfigError(
                f"--coordinator {args.coordinator}: the etcd's members are on the machines of the "
                "job; add --nnodes, three or more"
            )
        if args.coordinator != EMBEDDED and not is_etcd(args.coordinator):
            raise ConfigError(
                f"--coordinator {args.coordinator}: a single command runs its own coordinator; "
                "add --nnodes for several machines, or write etcd://HOST:PORT"
            )
        return None
    least, most = _nnodes(args.nnodes) if args.nnodes else (1, 1)
    if step and step.tasks > 1 and not args.nnodes and not args.join:
        least = most = step.tasks
    place = _place(args, step)
    if is_managed(place.address) and most < _LEAST_MANAGED and not args.join:
        raise ConfigError(
            f"--coordinator {args.coordinator} with --nnodes {args.nnodes or most}: an etcd on "
            "fewer than three machines survives the loss of none; give --nnodes of three or more, "
            "or HOST:PORT as the coordinator"
        )
    number = args.node_rank
    if number is None and step and not args.join:
        number = step.task
    patience_s = JOIN_S if args.join_timeout_s is None else args.join_timeout_s
    return JointConfig(
        place=place,
        key_file=shared_key_file(args.key_file),
        job=args.job or (f"slurm-{step.job}" if step else "job"),
        least=least,
        most=most,
        number=number,
        joins=args.join is not None,
        join_s=patience_s,
        host=checked_host(args.host, given="--host") if args.host else "",
    )


def domains(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the failure domain of each of this launcher's nodes; empty names if none is given.

    Raises ``ConfigError`` for invalid names, or if their number does not fit that of the nodes.
    """
    text: str = environment.get(DOMAIN_ENV, "") if args.domain is None else args.domain
    count: int = args.nodes
    if not text:
        return ("",) * count
    option = DOMAIN_ENV if args.domain is None else "--domain"
    names = tuple(check_domain(name, option) for name in text.split(","))
    if len(names) not in (1, count):
        raise ConfigError(
            f"{option} {text}: {len(names)} domains for {count} nodes; give one for all of them, "
            "or one for each"
        )
    return names if len(names) == count else names * count


def _place(args: argparse.Namespace, step: SlurmStep | None) -> CoordinatorPlace:
    if args.join is not None:
        return CoordinatorPlace.parse(args.join, may_host=False)
    if args.coordinator == MANAGED:
        if not step or not step.hosts:
            raise ConfigError(
                "--coordinator managed: no machine is named at which the job begins; add one, as "
                "in --coordinator managed://HOST, the same on all of them (under srun: not needed)"
            )
        address = f"{MANAGED}://{step.hosts[0]}:{step.port}"
        return CoordinatorPlace(address=address, may_host=step.task == 0)
    if args.coordinator != EMBEDDED:
        return CoordinatorPlace.parse(args.coordinator, may_host=False if args.node_rank else None)
    if step and step.hosts:
        return CoordinatorPlace(address=f"{step.hosts[0]}:{step.port}", may_host=step.task == 0)
    raise ConfigError(
        "several machines need a common coordinator: add --coordinator HOST:PORT (the launcher "
        "on HOST serves it) or an etcd:// address, the same on all of them"
    )


def _nnodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ConfigError(f"--nnodes {text}: give N or MIN:MAX")
    return int(least), int(most or least)
