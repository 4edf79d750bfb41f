"""`holdfast cat`: print a tensor, a slice of it, its statistics, or a plain value."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from holdfast.ckpt.checkpoints.boxes import BoxReader, budget, largest_chunk
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.errors import NotFoundError
from holdfast.ckpt.geometry.element_types import DType
from holdfast.ckpt.geometry.slicing import Selection, parse, select, split_name, tiles
from holdfast.ckpt.inspect.compare import leaves, number_of
from holdfast.ckpt.inspect.statistics import Accumulator, PartialStatistics, TensorStatistics
from holdfast.ckpt.inspect.values import decode, widened
from holdfast.ckpt.store.parallel import parallel
from holdfast.ckpt.types import Json
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.checkpoints import add_path, add_resources, add_step, open_step
from holdfast.tools.long_work import LongWork
from holdfast.tools.printing import json_text, say
from holdfast.tools.show.picture import HeatMap, histogram_svg, histogram_text
from holdfast.tools.subcommand import HelpFormatter, Subparsers, positive
from holdfast.tools.terminal import (
    console,
    print_json,
    shape_text,
)

Array: TypeAlias = npt.NDArray[Any]

_PRINTED: Final = 1000
"""A selection of more elements is printed by its corners only, as numpy does."""

_EDGE: Final = 3

_EPILOG: Final = """\
examples:
  holdfast cat runs/demo model.head.weight
  holdfast cat runs/demo 'model.head.weight[0:2, ::3]'     quote it: brackets mean files to a shell
  holdfast cat runs/demo model.head.weight --stats --histogram
  holdfast cat runs/demo model.head.weight --npy head.npy --svg head.svg --png head.png
  holdfast cat runs/demo optimizer.groups.0.lr             a plain value
  holdfast cat runs/demo optimizer.groups                  all plain values below a name

bfloat16, float8 and float4 are shown as float32, complex32 as complex64; both are exact. Statistics
are of the finite numbers; quantiles are right to 0.4 %. Only selected bytes are read, and verified.
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "cat",
        help="print a tensor, a slice of it, its statistics or a plain value",
        description="Prints the numbers of a stored tensor or slice, or a plain value.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    add_path(parser)
    parser.add_argument(
        "name", metavar="NAME[SLICE]", help="a tensor, a slice of one, or a plain value"
    )
    add_step(parser)
    parser.add_argument("--full", action="store_true", help="print every number")
    parser.add_argument("--stats", action="store_true", help="print statistics instead")
    parser.add_argument("--histogram", action="store_true", help="print a histogram instead")
    parser.add_argument("--bins", type=positive, default=24, metavar="N", help="its bars (24)")
    parser.add_argument("--svg", metavar="FILE", help="write the histogram as a picture")
    parser.add_argument("--png", metavar="FILE", help="write a heat map: blue < 0 < red")
    parser.add_argument("--npy", metavar="FILE", help="write the numbers as a NumPy file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_resources(parser)
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSelection:
    """A tensor, and the selected part of it."""

    asked: str
    fqn: str
    dtype: DType
    full_shape: tuple[int, ...]
    selection: Selection


def run(args: argparse.Namespace) -> int:
    """Print the tensor or the values that ``args`` name."""
    with closing(open_step(args.path, args.step)) as source:
        reader = BoxReader(source)
        chosen = _choose(source, reader, args.name)
        if chosen is None:
            _print_values(source, args)
        elif args.stats or args.histogram or args.svg or args.png or args.npy:
            _stream(reader, chosen, args)
        else:
            _print(reader, chosen, args)
    return 0


def _choose(source: StoreSource, reader: BoxReader, text: str) -> TensorSelection | None:
    """Return the tensor that ``text`` names; None if ``text`` may name a plain value."""
    aliases = source.manifest.aliases
    for name, inner in ((text, None), split_name(text)):
        parts = reader.tensors.get(aliases.get(name, name))
        if parts is None:
            continue
        try:
            selection = select(parse(inner) if inner is not None else (), parts.shape)
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{text}: {error}; {name} is {shape_text(parts.shape)}") from error
        return TensorSelection(
            asked=text,
            fqn=parts.fqn,
            dtype=parts.dtype,
            full_shape=parts.shape,
            selection=selection,
        )
    return None


def _print_values(source: StoreSource, args: argparse.Namespace) -> None:
    """Print the plain values at or below a path; a value of a single rank shows its rank."""
    trees = {"": source.manifest.values}
    trees |= {f" (rank {rank})": pack.rank_values for rank, pack in source.packs.items()}
    found: dict[str, Json] = {}
    for suffix, tree in trees.items():
        for path, value in leaves(tree):
            if path == args.name or path.startswith(f"{args.name}."):
                found[path + suffix] = value
    if not found:
        raise _unknown(
            source, args.name, [path for tree in trees.values() for path, _ in leaves(tree)]
        )
    if args.json:
        print_json({"name": args.name, "values": found})
        return
    for path, value in found.items():
        text = json_text(value)
        say(text if [args.name] == list(found) else f"{path} = {text}")


def _unknown(source: StoreSource, name: str, values: list[str]) -> NotFoundError:
    names = [*source.manifest.tensors, *source.manifest.aliases, *values]
    near = difflib.get_close_matches(split_name(name)[0], names, n=4, cutoff=0.5)
    remedy = f"similar: {', '.join(near)}" if near else "`holdfast inspect PATH` lists the names"
    return NotFoundError(f"{source.origin}: no tensor or plain value is named {name!r}; {remedy}")


def _numbers(reader: BoxReader, chosen: TensorSelection, part: Selection) -> Array:
    """Return the selected numbers; no dim is dropped."""
    return decode(reader.box(chosen.fqn, part.box)[part.within_box], chosen.dtype)


def _print(reader: BoxReader, chosen: TensorSelection, args: argparse.Namespace) -> None:
    """Print the numbers as numpy would; of a large selection, read and print only the corners."""
    selection, small = chosen.selection, chosen.selection.size <= _PRINTED
    box_bytes = chosen.dtype.itemsize * int(np.prod(selection.box.shape))
    if (small or args.full) and box_bytes <= args.memory:
        array = _numbers(reader, chosen, selection).reshape(_shown_shape(chosen))
        threshold = sys.maxsize
    elif args.full:
        raise ConfigError(
            f"{chosen.asked}: {selection.size:,} numbers do not fit in --memory; select fewer, "
            "allow more, or write them with --npy"
        )
    else:
        array, threshold = _corners(reader, chosen), 0
    if args.json:
        numbers = _as_json(array) if threshold else None
        print_json({**_about(chosen), "truncated": not threshold, "values": numbers})
        return
    shown = console()
    shown.print(_title(chosen), style="bold")
    width = shown.width if shown.is_terminal else 100
    text = np.array2string(array, threshold=threshold, edgeitems=_EDGE, max_line_width=width)
    print(text)


def _shown_shape(chosen: TensorSelection) -> tuple[int, ...]:
    shape = chosen.selection.shape
    if chosen.dtype.name != "float4_e2m1fn_x2":
        return shape
    return (*shape[:-1], shape[-1] * 2) if shape else (2,)


def _corners(reader: BoxReader, chosen: TensorSelection) -> Array:
    """Return the corners of a large selection with one filler between them, which numpy elides."""
    keep = [_ends(len(r)) for r in chosen.selection.ranges]
    shape = [sum(map(len, ends)) + (len(ends) > 1) for ends in keep]
    out = np.zeros(shape, chosen.dtype.numpy)
    for corner in np.ndindex(*map(len, keep)):
        picks = [ends[i] for ends, i in zip(keep, corner, strict=True)]
        ranges = tuple(
            r[p.start : p.stop] for r, p in zip(chosen.selection.ranges, picks, strict=True)
        )
        part = Selection(ranges=ranges)
        place = tuple(
            slice(0, len(p)) if i == 0 else slice(-len(p), None)
            for p, i in zip(picks, corner, strict=True)
        )
        out[place] = reader.box(chosen.fqn, part.box)[part.within_box]
    kept = [n for dim, n in enumerate(shape) if dim not in chosen.selection.dropped]
    return decode(out.reshape(kept), chosen.dtype)


def _ends(extent: int) -> list[range]:
    if extent <= 2 * _EDGE:
        return [range(extent)]
    return [range(_EDGE), range(extent - _EDGE, extent)]


def _title(chosen: TensorSelection) -> str:
    shape = shape_text(chosen.selection.shape)
    whole = shape_text(chosen.full_shape)
    of = "" if chosen.selection.shape == chosen.full_shape else f" of {whole}"
    return f"{chosen.asked}  {chosen.dtype.name}  {shape}{of}"


def _about(chosen: TensorSelection) -> dict[str, object]:
    return {
        "name": chosen.fqn,
        "asked": chosen.asked,
        "dtype": chosen.dtype.name,
        "tensor_shape": chosen.full_shape,
        "shape": chosen.selection.shape,
    }


def _as_json(array: Array) -> object:
    if array.dtype.kind in "iub" or (array.dtype.kind == "f" and np.isfinite(array).all()):
        return array.tolist()
    return np.vectorize(number_of, otypes=[object])(array).tolist() if array.size else []


def _stream(reader: BoxReader, chosen: TensorSelection, args: argparse.Namespace) -> None:
    """Read the selection once, tile by tile, and write every requested output from it."""
    total, heat = Accumulator(), HeatMap(chosen.selection.shape) if args.png else None
    out = _npy(chosen, args.npy) if args.npy else None
    at = 0
    for numbers, part in _read_tiles(reader, chosen, args):
        total.merge(part)
        if heat is not None:
            heat.add(numbers)
        if out is not None:
            out[at : at + numbers.size] = numbers
        at += numbers.size
    summary, bars = total.summary(), total.bars(args.bins)
    if heat is not None:
        Path(args.png).write_bytes(heat.png())
    if args.svg:
        Path(args.svg).write_text(histogram_svg(bars, title=_title(chosen)), encoding="utf-8")
    if args.json:
        rows = [{"low": bar.low, "high": bar.high, "count": bar.count} for bar in bars]
        print_json({**_about(chosen), "stats": summary, "histogram": rows})
        return
    shown = console()
    shown.print(_title(chosen), style="bold")
    if args.stats or not args.histogram:
        _show_summary(shown, summary)
    if args.histogram:
        width = shown.width if shown.is_terminal else 100
        shown.print(histogram_text(bars, width=width))


def _npy(chosen: TensorSelection, file: str) -> Array:
    """Create a NumPy file and return it as one flat array, to be filled from the start."""
    kind, shape = widened(chosen.dtype), _shown_shape(chosen)
    if not chosen.selection.size:
        np.save(Path(file), np.empty(shape, kind), allow_pickle=False)
        return np.empty(0, kind)
    room = np.lib.format.open_memmap(Path(file), mode="w+", dtype=kind, shape=shape)
    return room.reshape(-1)


def _read_tiles(
    reader: BoxReader, chosen: TensorSelection, args: argparse.Namespace
) -> Iterator[tuple[Array, PartialStatistics]]:
    """Yield the selection's numbers in C order, flat, each tile with its statistics."""
    chunk = largest_chunk([reader.tensors[chosen.fqn]])
    limits = budget(args.memory // 2, threads=args.threads, largest_chunk=chunk)

    def work(part: Selection) -> tuple[Array, PartialStatistics]:
        numbers = np.ascontiguousarray(_numbers(reader, chosen, part)).reshape(-1)
        seen = Accumulator()
        seen.add(numbers)
        return numbers, seen.part()

    parts = tiles(
        chosen.selection,
        itemsize=chosen.dtype.itemsize,
        most_bytes=limits.tile_bytes // 4,
        cell=reader.cell(chosen.fqn),
    )
    with LongWork("Nothing was changed.") as bar:
        task = bar.add_task("reading", total=chosen.selection.size * chosen.dtype.itemsize)
        for numbers, part in parallel(work, parts, threads=limits.threads):
            yield numbers, part
            bar.advance(task, numbers.size * chosen.dtype.itemsize)


def _show_summary(shown: Console, summary: TensorStatistics) -> None:
    table = Table.grid(padding=(0, 3))
    rows: list[tuple[str, str]] = [
        ("numbers", f"{summary.count:,}"),
        ("zeros", f"{summary.zeros:,}"),
        ("NaN", f"{summary.nan:,}"),
        ("+inf, -inf", f"{summary.positive_infinite:,}, {summary.negative_infinite:,}"),
    ]
    for name in ("minimum", "maximum", "mean", "std", "norm"):
        value = getattr(summary, name)
        rows.append((name, "none" if value is None else f"{value:.7g}"))
    rows += [(f"{100 * float(q):g} % below", f"{v:.4g}") for q, v in summary.quantiles.items()]
    half = -(-len(rows) // 2)
    for left, right in zip(rows[:half], [*rows[half:], ("", "")], strict=False):
        table.add_row(*left, *right)
    for column in (1, 3):
        table.columns[column].justify = "right"
    shown.print(table)
