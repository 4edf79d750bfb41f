"""`holdfast chaos survive`: try one by one which sets of nodes a job may lose at once."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import track

from holdfast.tools.chaos.commands import Add, Words
from holdfast.tools.chaos.commands.check import EXIT_BROKEN
from holdfast.tools.chaos.report.losses import OUTCOMES, Loss, Prediction
from holdfast.tools.chaos.report.summary import Cell, survival
from holdfast.tools.chaos.survival import simulated
from holdfast.tools.chaos.survival.measured import Measuring
from holdfast.tools.chaos.survival.sets import broken, drawn, names
from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import console, step_number

_OUT: Final = Path("holdfast-chaos")
_MOST_REAL: Final = 16

WORDS: Final = Words(
    help="find out which sets of nodes a job can lose at once",
    description="Kills every set of nodes at once, with their memory, each set in a job of its "
    "own, and shows which losses the training survives.",
    epilog="""\
examples:
  holdfast chaos survive --nodes 4 --parity 1
  holdfast chaos survive --nodes 6 --parity 2 --seed 7 --json survival.json
  holdfast chaos survive --nodes 4 --parity 1 --world real --out runs/survive
  holdfast chaos report runs/survive --out survive.html

After the loss of at most PARITY nodes a job must go on from memory, after a larger loss from memory
or from a checkpoint. With real processes the simulation predicts the result of each set, and the
real result may not be worse. A second call skips the sets that the folder already has. Exit codes:
0 every promise was kept, 1 a promise was broken, 2 wrong command line.
""",
)


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A set of nodes whose loss did not end as promised, and the reason."""

    nodes: tuple[str, ...]
    why: str


class _Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all tries."""

    losses: list[Loss] = []
    broken: list[Broken] = []


def declare(add: Add) -> None:
    """Declare the arguments."""
    most = simulated.MOST_NODES
    add(
        "--nodes",
        type=positive,
        required=True,
        metavar="N",
        help=f"number of nodes, at most {most}",
    )
    add(
        "--parity",
        type=step_number,
        required=True,
        metavar="M",
        help="number of nodes that the job must be able to lose",
    )
    add(
        "--seed",
        type=step_number,
        default=0,
        metavar="N",
        help="seed of the simulations (default: 0)",
    )
    add(
        "--world",
        choices=("real", "simulated"),
        default="simulated",
        help="use real processes or simulate them (default: %(default)s)",
    )
    add(
        "--most",
        type=positive,
        metavar="N",
        help=f"try only N sets, drawn with the seed (default: {_MOST_REAL} with real processes, "
        "else all)",
    )
    add("--out", type=Path, metavar="DIR", help="directory of the runs of real processes")
    add("--json", type=Path, metavar="FILE", help="write the matrix as JSON")


def run(args: argparse.Namespace) -> int:
    """Try the sets and print the matrix; 1 if one did not end as promised."""
    simulated.check(args.nodes, args.parity)
    is_real = args.world == "real"
    most = args.most or (_MOST_REAL if is_real else None)
    chosen = drawn(args.nodes, most=most, seed=args.seed)
    shown, progress = console(), console(stderr=True)
    measuring = Measuring(
        args.out or _OUT / f"survive-{args.nodes}-{args.parity}",
        tell=lambda text: progress.print(f"  {text}", style="dim", markup=False),
    )
    tried = _Tried()
    for nodes in track(chosen, "losing", console=shown, transient=True):
        _try(nodes, args, measuring if is_real else None, tried)
    if args.json:
        about = {"world": args.world, "nodes": args.nodes, "parity": args.parity, "seed": args.seed}
        encoded = msgspec.json.encode({**about, "sets": tried.losses, "broken": tried.broken})
        args.json.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    show(survival(tried.losses), tried.broken, parity=args.parity, console=shown)
    return EXIT_BROKEN if tried.broken else 0


def _try(
    nodes: Sequence[int], args: argparse.Namespace, measuring: Measuring | None, tried: _Tried
) -> None:
    """Lose a set of nodes in a simulation, and also in real processes if ``measuring`` is given."""
    who, of, parity = names(nodes), args.nodes, args.parity
    outcome, why = simulated.lose(nodes, of=of, parity=parity, seed=args.seed)
    loss: Loss | None = Loss(nodes=who, of=of, outcome=outcome)
    if measuring:
        wrong = [f"in the simulation: {why}"] if why else []
        predicted = Prediction(nodes=who, of=of, parity=parity, outcome=outcome)
        loss, why = measuring.lose(predicted)
        wrong += [each for each in (why, broken(loss) if loss else "") if each]
        why = "; ".join(wrong)
    if loss:
        tried.losses.append(loss)
    if why:
        tried.broken.append(Broken(nodes=who, why=why))


def show(
    matrix: Mapping[int, tuple[Cell, ...]],
    broken: Sequence[Broken],
    *,
    parity: int,
    console: Console,
) -> None:
    """Print the outcomes by number of nodes, then deviations and broken promises."""
    for size, cells in matrix.items():
        found = Counter(cell.outcome for cell in cells)
        words = [f"{found[name]} {OUTCOMES[name]}" for name in OUTCOMES if found[name]]
        words += [f"{found[None]} not tried"] if found[None] else []
        noun = "node" if size == 1 else "nodes"
        promise = ", covered by parity" if size <= parity else ""
        console.print(f"  {size} {noun} lost{promise}: {'; '.join(words)}")
    for cell in (cell for cells in matrix.values() for cell in cells):
        if cell.outcome and cell.predicted and cell.differs:
            words = [f"  ≠ {' '.join(cell.nodes)}: {OUTCOMES[cell.outcome]}"]
            words += [f"predicted: {OUTCOMES[cell.predicted]}"]
            console.print("; ".join(words), style="yellow", markup=False)
    for each in broken:
        console.print(f"  ✕ {' '.join(each.nodes)}: {each.why}", style="bold red", markup=False)
