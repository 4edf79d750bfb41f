"""`holdfast diff`: show the differences between two checkpoints in names, shapes and values."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Final, TypeAlias

import msgspec

from holdfast.ckpt.checkpoints.assemble import TensorChunks
from holdfast.ckpt.checkpoints.boxes import BoxReader
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.inspect.compare import Tally, Tolerance, ValueDifference, compare_values
from holdfast.ckpt.inspect.differ import (
    KindDifference,
    Pair,
    TensorComparison,
    compare_tensors,
    equal_by_checksums,
    kind_difference,
)
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.checkpoints import (
    add_resources,
    add_select,
    chosen,
    open_step,
    require,
)
from holdfast.tools.commands.foreign import ForeignStep, open_foreign
from holdfast.tools.long_work import LongWork
from holdfast.tools.show.difference import CheckpointDifference, SideInfo, show
from holdfast.tools.subcommand import HelpFormatter, Subparsers, report
from holdfast.tools.terminal import (
    console,
    place,
    print_json,
    step_number,
)

Step: TypeAlias = StoreSource | ForeignStep

EXIT_DIFFERENT: Final = 1
EXIT_TROUBLE: Final = 2

_EPILOG: Final = """\
examples:
  holdfast diff runs/a runs/b                       the newest steps, bit for bit
  holdfast diff runs/demo runs/demo --step-a 100 --step-b 200
  holdfast diff runs/a runs/b --rtol 1e-5 --select 'model.*'

Numbers are within tolerance when |a-b| <= ATOL + RTOL * max(|a|, |b|). With a tolerance NaN equals
NaN, whatever its bits, and 0 equals -0; without one, bits must be equal. Either way an infinity
equals only itself. Exit codes: 0 same, 1 different, 2 wrong command line or unreadable checkpoint.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "diff",
        help="show the differences between two checkpoints",
        description="Compares names, shapes, element types and values of two checkpoints, "
        "whatever their layouts. Every byte that is read is checked. Either may be of another "
        "format that `holdfast convert` reads.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "a", type=place, metavar="A", help="a root of checkpoints, or one step of it"
    )
    parser.add_argument("b", type=place, metavar="B", help="another one")
    parser.add_argument(
        "--step-a", type=step_number, metavar="STEP", help="A's step (newest verified)"
    )
    parser.add_argument(
        "--step-b", type=step_number, metavar="STEP", help="B's step (newest verified)"
    )
    parser.add_argument("--rtol", type=_distance, help="relative tolerance (none)")
    parser.add_argument("--atol", type=_distance, help="absolute tolerance (none)")
    add_select(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--keys", action="store_true", help="compare only names, shapes and types")
    what.add_argument("--values", action="store_true", help="compare only plain values")
    what.add_argument(
        "--checksums",
        action="store_true",
        help="do not read tensors whose recorded checksums are equal: fast, but no proof",
    )
    parser.add_argument(
        "--full", action="store_true", help="show every difference, not only the first ones"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_resources(parser)
    return parser


def _distance(text: str) -> float:
    try:
        distance = float(text)
    except ValueError:
        distance = -1.0
    if not 0 <= distance < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0, as in 1e-5")
    return distance


def run(args: argparse.Namespace) -> int:
    """Compare, print the difference, and return 0 for none, 1 for a difference, 2 for an error."""
    try:
        with (
            closing(_opened(args.a, args.step_a, args)) as a,
            closing(_opened(args.b, args.step_b, args)) as b,
        ):
            found = difference(a, b, args)
    except CkptError as error:
        report(str(error))
        return EXIT_TROUBLE
    if args.json:
        print_json({"same": found.same, **msgspec.to_builtins(found)})
    else:
        show(found, console=console(), full=args.full)
    return 0 if found.same else EXIT_DIFFERENT


def _opened(path: str, step: int | None, args: argparse.Namespace) -> Step:
    foreign = open_foreign(path, step)
    if foreign is not None and args.checksums:
        foreign.close()
        raise ConfigError(f"--checksums: {path} ({foreign.kind}) has none; leave the option out")
    return foreign or open_step(path, step)


def difference(a: Step, b: Step, args: argparse.Namespace) -> CheckpointDifference:
    """Return the difference between the parts of two checkpoints that ``args`` select."""
    tolerance = None
    if args.rtol is not None or args.atol is not None:
        tolerance = Tolerance(rtol=args.rtol or 0.0, atol=args.atol or 0.0)
    found = CheckpointDifference(a=_side(a), b=_side(b), tolerance=tolerance)
    values = () if args.keys else tuple(_values(a, b, args.select, tolerance or Tolerance()))
    found = msgspec.structs.replace(found, values=values, notes=tuple(_notes(a, b)))
    names_a, names_b = _names(a), _names(b)
    common = chosen((name for name in names_a if name in names_b), args.select)
    only_a = chosen((name for name in names_a if name not in names_b), args.select)
    only_b = chosen((name for name in names_b if name not in names_a), args.select)
    value_names = [difference.path for difference in values] or chosen(
        a.manifest.values, args.select
    )
    require([*common, *only_a, *only_b, *value_names], args.select, origin=f"{a.origin} and B")
    if args.values:
        return found
    return _tensors(
        msgspec.structs.replace(found, only_a=tuple(only_a), only_b=tuple(only_b)),
        (BoxReader(a), BoxReader(b)),
        [(name, names_a[name], names_b[name]) for name in common],
        args,
    )


def _side(source: Step) -> SideInfo:
    manifest = source.manifest
    return SideInfo(
        path=source.path if isinstance(source, ForeignStep) else source.store.where(source.folder),
        step=manifest.step,
        run=manifest.run,
        mesh=manifest.mesh,
    )


def _names(source: Step) -> dict[str, str]:
    """Return every name of a tensor, aliases included, mapped to the name it is stored under."""
    stored = {fqn: fqn for fqn in source.manifest.tensors}
    return stored | source.manifest.aliases


def _values(
    a: Step, b: Step, globs: list[str] | None, tolerance: Tolerance
) -> Iterator[ValueDifference]:
    for values_a, values_b in _value_trees(a, b):
        for found in compare_values(values_a, values_b, tolerance=tolerance):
            if chosen([found.path], globs):
                yield found


def _value_trees(a: Step, b: Step) -> Iterator[tuple[dict[str, Json], dict[str, Json]]]:
    yield a.manifest.values, b.manifest.values
    if a.packs.keys() == b.packs.keys():
        for rank in a.packs:
            one, other = a.packs[rank].rank_values, b.packs[rank].rank_values
            yield _of_rank(rank, one), _of_rank(rank, other)


def _of_rank(rank: int, values: dict[str, Json]) -> dict[str, Json]:
    return {f"{name} (rank {rank})": value for name, value in values.items()}


def _notes(a: Step, b: Step) -> Iterator[str]:
    ranks_a, ranks_b = len(a.packs), len(b.packs)
    has_rank_values = any(index.rank_values for index in (*a.packs.values(), *b.packs.values()))
    if has_rank_values and not (ranks_a and ranks_b):
        yield "values of single ranks are not compared: only one of A and B has them"
    elif ranks_a != ranks_b and has_rank_values:
        yield (
            f"A was saved by {ranks_a} ranks, B by {ranks_b}: values of single ranks are not "
            "compared"
        )
    if a.manifest.aliases != b.manifest.aliases:
        yield "A and B tie different names to one tensor; values are compared under every name"


def _tensors(
    found: CheckpointDifference,
    readers: tuple[BoxReader, BoxReader],
    names: list[tuple[str, str, str]],
    args: argparse.Namespace,
) -> CheckpointDifference:
    """Compare the tensors that both have; a tied tensor once, under its first name."""
    kinds: list[KindDifference] = []
    pairs: list[Pair] = []
    seen: set[tuple[str, str]] = set()
    for name, fqn_a, fqn_b in names:
        if (fqn_a, fqn_b) in seen:
            continue
        seen.add((fqn_a, fqn_b))
        a, b = readers[0].tensors[fqn_a], readers[1].tensors[fqn_b]
        if kind := kind_difference(name, a, b):
            kinds.append(kind)
        else:
            pairs.append(Pair(name=name, a=a, b=b))
    found = msgspec.structs.replace(found, kinds=tuple(kinds))
    if args.keys:
        return found
    taken = {p.name for p in pairs if args.checksums and equal_by_checksums(p.a, p.b)}
    reading = [pair for pair in pairs if pair.name not in taken]
    total = sum(pair.nbytes for pair in reading)
    compared = {pair.name: _unread(pair.name, pair.a) for pair in pairs}
    with LongWork("Nothing was changed.") as bar:
        task = bar.add_task("comparing", total=total)
        for tensor in compare_tensors(
            *readers,
            reading,
            tolerance=found.tolerance or Tolerance(),
            memory_bytes=args.memory,
            threads=args.threads,
            progress=lambda n: bar.advance(task, n),
        ):
            compared[tensor.name] = tensor
    return msgspec.structs.replace(found, tensors=tuple(compared.values()), compared_bytes=total)


def _unread(name: str, parts: TensorChunks) -> TensorComparison:
    return TensorComparison(
        name=name, dtype=parts.dtype.name, shape=parts.shape, tally=Tally(), read=False
    )
