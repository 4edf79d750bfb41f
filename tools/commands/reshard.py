"""`holdfast reshard`: rewrite a checkpoint for another layout."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final

from holdfast.ckpt.checkpoints.catalog import choose
from holdfast.ckpt.checkpoints.source import StoreSource
from holdfast.ckpt.convert.checkpoint import CheckpointSink, Identity
from holdfast.ckpt.convert.interchange import MEMORY_BYTES, Transferred, nbytes_of, transfer
from holdfast.ckpt.convert.rewrite import reshard
from holdfast.ckpt.convert.target_layout import DATA_AXIS, SplitRule, TargetLayout
from holdfast.ckpt.format.manifest import Manifest
from holdfast.ckpt.geometry.layout import TensorSpec
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.checkpoints import (
    add_compress,
    add_path,
    add_step,
    compression_of,
    pointed_at,
)
from holdfast.tools.commands.foreign import ForeignStep, open_foreign
from holdfast.tools.long_work import LongWork
from holdfast.tools.printing import say
from holdfast.tools.terminal import parse_bytes, place, print_json, readable

if TYPE_CHECKING:
    from holdfast.tools.subcommand import Subparsers

MAX_RANKS: Final = 65_536

_AXIS: Final = re.compile(r"([a-z][a-z0-9_]*)=(\d{1,5})")
_RULE: Final = re.compile(r"(.+)=(?:([a-z][a-z0-9_]*):)?(-?\d{1,2})")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "reshard",
        help="rewrite a checkpoint for another layout",
        description="Writes a checkpoint again, as the ranks of another mesh would have saved "
        "it. Loading needs no resharding: any layout loads any checkpoint. Every byte is checked "
        "on the way, and the source is not changed. After an interruption the same command "
        "continues after the last complete writer.",
    )
    add_path(parser, "source", "SRC")
    parser.add_argument("target", type=place, metavar="DST", help="the root to write to")
    parser.add_argument(
        "--mesh",
        type=mesh,
        required=True,
        metavar="AXIS=N,…",
        help="the new layout, as in dp=4 or dp=2,tp=2; dp splits dim 0 of every tensor, as FSDP2 "
        "does; --shard defines the split along other axes",
    )
    parser.add_argument(
        "--shard",
        action="append",
        type=rule,
        default=[],
        metavar="GLOB=[AXIS:]DIM",
        help="split dim DIM of the tensors that match, as in '*.wq.weight=0'; name AXIS if the "
        "mesh has several axes besides dp. The last rule that matches applies",
    )
    add_step(parser)
    parser.add_argument(
        "--memory",
        type=parse_bytes,
        default=MEMORY_BYTES,
        metavar="SIZE",
        help="working memory, as in 512MiB (2GiB)",
    )
    add_compress(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def mesh(text: str) -> dict[str, int]:
    """Parse ``dp=2,tp=2``; an argparse type."""
    axes: dict[str, int] = {}
    ranks = 1
    for part in text.split(","):
        match = _AXIS.fullmatch(part)
        if match is None or match[1] in axes or int(match[2]) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a mesh; give dp=N, or several axes as in dp=2,tp=2"
            )
        axes[match[1]] = int(match[2])
        ranks *= axes[match[1]]
    if ranks > MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text!r} has {ranks} ranks; {MAX_RANKS} at most")
    return axes


def rule(text: str) -> tuple[str, str | None, int]:
    """Parse ``GLOB=[AXIS:]DIM``; an argparse type."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form GLOB=DIM or GLOB=AXIS:DIM")
    return match[1], match[2], int(match[3])


def layout_of(axes: dict[str, int], rules: list[tuple[str, str | None, int]]) -> TargetLayout:
    """Return the layout; a rule without an axis applies to the one axis besides dp.

    Raises ``ConfigError`` if there is no such axis, or several, or if a rule names an unknown axis.
    """
    others = [axis for axis in axes if axis != DATA_AXIS]
    found = []
    for glob, named, dim in rules:
        if named is None and len(others) != 1:
            raise ConfigError(
                f"--shard {glob}={dim}: the mesh has the axes {', '.join(axes)}; say which one "
                f"splits, as in {glob}={(others or list(axes))[0]}:{dim}"
            )
        axis = named or others[0]
        if axis not in axes:
            raise ConfigError(
                f"--shard {glob}={axis}:{dim}: the mesh has the axes {', '.join(axes)}"
            )
        found.append(SplitRule(glob=glob, axis=axis, dim=dim))
    return TargetLayout(mesh=axes, rules=tuple(found))


RESUMED: Final = "goes on after the last complete writer"


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint in the new layout and print its place."""
    layout = layout_of(args.mesh, args.shard)
    foreign = open_foreign(args.source, args.step)
    if foreign is not None:
        with foreign:
            return _run_foreign(foreign, layout, args)
    root, named = pointed_at(args.source, args.step)
    step = choose(root, named)
    with StoreSource(root, step) as source, LongWork(_kept(args, RESUMED)) as bar:
        compression = compression_of(args.compress, source.manifest.tensors, origin=source.origin)
        total = _total(source.manifest)
        task = bar.add_task("writing", total=total)
        done = reshard(
            source,
            args.target,
            layout=layout,
            compression=compression,
            memory_bytes=args.memory,
            progress=lambda n: bar.advance(task, n),
        )
        written = f"{str(args.target).rstrip('/')}/{source.folder}"
    _tell(args, layout, step=step, path=written, done=done, total=total)
    return 0


def _run_foreign(step: ForeignStep, layout: TargetLayout, args: argparse.Namespace) -> int:
    """Write a checkpoint of another format as one of Holdfast's, in the layout."""
    compression = compression_of(args.compress, step.source.specs, origin=step.origin)
    sink = CheckpointSink(
        args.target, layout=layout, identity=Identity(compression=compression or {})
    )
    with sink, LongWork(_kept(args, "begins anew")) as bar:
        task = bar.add_task("writing", total=_total(step.manifest))
        done = transfer(
            step.source,
            sink,
            memory_bytes=args.memory,
            progress=lambda n: bar.advance(task, n),
            step=step.step,
        )
    _tell(args, layout, step=step.step, path=sink.where, done=done, total=done.bytes)
    return 0


def _kept(args: argparse.Namespace, next_time: str) -> str:
    return (
        f"{args.source} is as before, and {args.target} shows no new step; the same command "
        f"{next_time}."
    )


def _tell(
    args: argparse.Namespace,
    layout: TargetLayout,
    *,
    step: int,
    path: str,
    done: Transferred,
    total: int,
) -> None:
    if args.json:
        print_json(
            {
                "step": step,
                "path": path,
                "mesh": args.mesh,
                "ranks": layout.ranks,
                "bytes": done.bytes,
                "bytes_found_complete": total - done.bytes,
                "seconds": done.seconds,
            }
        )
        return
    left = total - done.bytes
    resumed = f", {readable(left)} already in the target" if left > 0 else ""
    say(f"step {step} written: {path} ({readable(done.bytes)} in {done.seconds:.1f} s{resumed})")


def _total(manifest: Manifest) -> int:
    return sum(
        nbytes_of(TensorSpec(fqn=fqn, dtype=tensor.dtype, shape=tensor.shape))
        for fqn, tensor in manifest.tensors.items()
    )
