"""`holdfast chaos survive`: which sets of nodes a job may lose at once, tried one by one.

Each set is lost in a simulation of the job of its own: production decisions on virtual time
(`elastic.testing.simulator`), whose oracle also fails where a protected step is not restored
although no more nodes are gone than parity covers.
"""

from __future__ import annotations

import argparse
import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from rich.console import Console
from rich.progress import track

from elastic.errors import ConfigError
from elastic.records import TRAINER, JobSpec
from elastic.testing.faults import Fault, FaultKind
from elastic.testing.simulated_training import InvariantError
from elastic.testing.simulator import Simulation, SimulationConfig
from tools.chaos.report.page import OUTCOMES
from tools.chaos.report.run import Loss, Outcome
from tools.chaos.report.summary import Cell, survival
from tools.terminal import HelpFormatter, console, positive, step_number

if TYPE_CHECKING:
    from tools.cli import Subparsers

EXIT_BROKEN: Final = 1

_STEPS: Final = 120
_LOST_AT_S: Final = 5.0
"""Behind the slowest start of all nodes (`SimulationConfig.startup_s`), before the last step."""

_BACK_AT_S: Final = 8.0
_MOST_NODES: Final = 12

_EPILOG: Final = """\
examples:
  holdfast chaos survive --nodes 4 --parity 1
  holdfast chaos survive --nodes 6 --parity 2 --seed 7 --json survival.json

Every set of at most PARITY nodes must be survived from memory, every larger one from memory or from
a checkpoint. Exit codes: 0 all as promised, 1 something was lost, 2 wrong command line.
"""


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A set of nodes whose loss did not end as promised, and why."""

    nodes: tuple[str, ...]
    why: str


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "survive",
        help="try which sets of nodes a job may lose at once",
        description="Loses every set of nodes of a simulated job at once, with their memory, each "
        "in a job of its own, and shows which were survived.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=positive, required=True, metavar="N", help=f"at most {_MOST_NODES}")
    add("--parity", type=step_number, required=True, metavar="M", help="nodes that may be lost")
    add("--seed", type=step_number, default=0, metavar="N", help="of the simulations (0)")
    add("--json", type=Path, metavar="FILE", help="write the matrix as JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Try all sets, print the matrix; 1 when one did not end as promised."""
    if args.nodes > _MOST_NODES:
        raise ConfigError(
            f"{args.nodes} nodes have {2**args.nodes - 1} sets; give {_MOST_NODES} or fewer"
        )
    if args.parity >= args.nodes:
        raise ConfigError(f"--parity {args.parity} of {args.nodes} nodes: give fewer than nodes")
    shown = console()
    losses, broken = [], []
    for nodes in track(list(sets(args.nodes)), "losing", console=shown, transient=True):
        outcome, why = lose(nodes, of=args.nodes, parity=args.parity, seed=args.seed)
        losses.append(Loss(nodes=names(nodes), of=args.nodes, outcome=outcome))
        if why:
            broken.append(Broken(nodes=names(nodes), why=why))
    matrix = survival(losses)
    if args.json:
        told = {"nodes": args.nodes, "parity": args.parity, "seed": args.seed, "sets": losses}
        encoded = msgspec.json.encode({**told, "broken": broken})
        args.json.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    show(matrix, broken, parity=args.parity, console=shown)
    return EXIT_BROKEN if broken else 0


def sets(nodes: int) -> Iterator[tuple[int, ...]]:
    """Yield every set of nodes but the empty one, small ones first."""
    for size in range(1, nodes + 1):
        yield from combinations(range(nodes), size)


def names(nodes: Sequence[int]) -> tuple[str, ...]:
    """Return the names of nodes by their numbers, as the simulation gives them."""
    return tuple(f"n{number}" for number in nodes)


def lose(nodes: Sequence[int], *, of: int, parity: int, seed: int) -> tuple[Outcome, str]:
    """Lose nodes by their numbers at once; return the outcome, and what is wrong with it, if so."""
    config = _config(of, parity)
    at_s = _LOST_AT_S + random.Random(f"{nodes} {seed}").random()
    faults = [Fault(kind=FaultKind.NODE, at_s=at_s, node=node) for node in nodes]
    try:
        before = _undisturbed(of, parity, seed)
        after = Simulation(config, seed=seed, faults=faults).run()
    except InvariantError as error:
        return "lost", str(error).splitlines()[-1].strip()
    if not after.outcome.ok:
        return "refused", "" if len(nodes) > parity else after.outcome.message
    if after.restores["nothing"] > before:
        why = f"went back to the checkpoint, though parity covers {parity} nodes"
        return "checkpoint", why if len(nodes) <= parity else ""
    return "survived", ""


def _config(of: int, parity: int) -> SimulationConfig:
    return SimulationConfig(
        nodes=of,
        wanted={TRAINER: of},
        slots={TRAINER: 1},
        spec=JobSpec(parity=parity),
        steps=_STEPS,
        faults=0,
        calm_s=_BACK_AT_S,
    )


@functools.lru_cache(1)
def _undisturbed(of: int, parity: int, seed: int) -> int:
    """Return how many generations have nothing in memory to restore where nothing is lost."""
    return Simulation(_config(of, parity), seed=seed, faults=()).run().restores["nothing"]


def show(
    matrix: dict[int, tuple[Cell, ...]],
    broken: Sequence[Broken],
    *,
    parity: int,
    console: Console,
) -> None:
    """Print for each number of nodes what became of its sets, and what broke a promise."""
    for size, cells in matrix.items():
        found = Counter(cell.outcome for cell in cells)
        words = [f"{found[name]} {OUTCOMES[name]}" for name in OUTCOMES if found[name]]
        noun = "node" if size == 1 else "nodes"
        promise = ", covered by parity" if size <= parity else ""
        console.print(f"  {size} {noun} lost{promise}: {'; '.join(words)}")
    for each in broken:
        console.print(f"  ✕ {' '.join(each.nodes)}: {each.why}", style="bold red", markup=False)
