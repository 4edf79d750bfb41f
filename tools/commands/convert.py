"""`holdfast convert`: convert tensors between all known formats."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack, closing
from hashlib import sha256
from typing import TYPE_CHECKING, Final

from holdfast.ckpt.convert.checkpoint import Identity
from holdfast.ckpt.convert.interchange import (
    MEMORY_BYTES,
    TensorSource,
    Transferred,
    nbytes_of,
    transfer,
)
from holdfast.ckpt.convert.patterns.choice import Patterns, shipped
from holdfast.ckpt.convert.patterns.source import PatternedSource
from holdfast.ckpt.convert.renaming import (
    Renamed,
    selected,
    the_module,
    with_prefix,
    without_prefix,
)
from holdfast.ckpt.convert.target_layout import DATA_AXIS, TargetLayout
from holdfast.ckpt.state.plain import is_digest
from holdfast.elastic.errors import ConfigError
from holdfast.tools.commands.checkpoints import add_compress, compression_of
from holdfast.tools.commands.formats import (
    FORMATS,
    SourceOptions,
    TargetOptions,
    source_format,
    target_format,
)
from holdfast.tools.long_work import LongWork
from holdfast.tools.printing import say
from holdfast.tools.subcommand import positive
from holdfast.tools.terminal import (
    parse_bytes,
    place,
    print_json,
    readable,
    step_number,
)

if TYPE_CHECKING:
    from holdfast.tools.subcommand import Subparsers

_DESCRIPTION: Final = (
    "Converts between checkpoints of Holdfast, of torch.distributed.checkpoint, safetensors "
    "files (single, or sharded as Hugging Face does), torch.save files, Zarr directories and "
    "directories of DeepSpeed (ZeRO's, which are read only, and universal ones), piece by piece "
    "in bounded memory. Without --from and --to the command recognises the formats. Nothing is "
    "overwritten, and the target appears complete or not at all."
)


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "convert", help="convert between formats of checkpoints", description=_DESCRIPTION
    )
    parser.add_argument("source", type=place, metavar="SOURCE", help="a file or a directory")
    parser.add_argument(
        "target",
        type=place,
        metavar="TARGET",
        help="file or directory to write; it must not exist yet",
    )
    parser.add_argument("--from", dest="source_format", choices=FORMATS, help="format of SOURCE")
    parser.add_argument("--to", dest="target_format", choices=FORMATS, help="format of TARGET")
    _add_names(parser)
    _add_ways(parser)
    return parser


def _add_names(parser: argparse.ArgumentParser) -> None:
    names = parser.add_argument_group("selection and names")
    names.add_argument(
        "--select",
        action="append",
        metavar="GLOB",
        help="convert only names of SOURCE that match, as in 'model.*'; repeatable",
    )
    prefix = names.add_mutually_exclusive_group()
    prefix.add_argument(
        "--prefix",
        type=_prefix,
        metavar="TEXT",
        help="prefix of the model's names in a whole state, as in 'model.'. A safetensors or "
        "torch target gets the names without it (and only tensors that have it); a safetensors "
        "or torch source gets the prefix added",
    )
    prefix.add_argument(
        "--name",
        type=_module,
        metavar="NAME",
        help="name of the model in the state; the same as --prefix NAME.",
    )
    names.add_argument(
        "--patterns",
        metavar="FILE",
        help="pattern file that says how the tensors of SOURCE form those of TARGET, or a shipped "
        f"name: {', '.join(shipped())}. It sees the names of SOURCE, after --select",
    )
    names.add_argument(
        "--set",
        action="append",
        type=_size,
        default=[],
        metavar="NAME=NUMBER",
        help="a size that the pattern file names, as in tp=4; repeatable",
    )
    names.add_argument(
        "--reverse",
        action="store_true",
        help="apply the patterns backwards: make pieces of whole tensors",
    )
    names.add_argument(
        "--tie",
        action="append",
        type=_tie,
        default=[],
        metavar="NAME=STORED",
        help="safetensors source: NAME is tied to the tensor STORED",
    )
    names.add_argument(
        "--duplicate-tied",
        action="store_true",
        help="safetensors target: store tied tensors under every name",
    )


def _add_ways(parser: argparse.ArgumentParser) -> None:
    ways = parser.add_argument_group("how")
    ways.add_argument(
        "--step",
        type=step_number,
        metavar="STEP",
        help="of a checkpoint: the step to read (the newest verified), or to write (that of the "
        "source, else 0)",
    )
    ways.add_argument(
        "--dp",
        type=positive,
        metavar="N",
        help="write a checkpoint as N ranks would (1)",
    )
    ways.add_argument(
        "--file-size",
        type=parse_bytes,
        metavar="SIZE",
        help="safetensors target: split larger data into files of this size with an index "
        "(default: 4GiB)",
    )
    ways.add_argument(
        "--named-types",
        action="store_true",
        help="zarr target: give bfloat16 and float8 the Zarr data types of these names, which "
        "TensorStore knows; else they are unsigned integers, which every reader opens",
    )
    ways.add_argument(
        "--dimension-names",
        action="append",
        type=_dimensions,
        default=[],
        metavar="GLOB=A,B",
        help="zarr target: names of the dimensions of the tensors that match, for xarray; "
        "repeatable, the first match counts. Others are named by their tensor and a number",
    )
    ways.add_argument(
        "--memory",
        type=parse_bytes,
        default=MEMORY_BYTES,
        metavar="SIZE",
        help="working memory, as in 512MiB (2GiB)",
    )
    add_compress(ways)
    ways.add_argument("--json", action="store_true", help="print JSON")


def _tie(text: str) -> tuple[str, str]:
    name, _, stored = text.partition("=")
    if not name or not stored:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=STORED")
    return name, stored


def _size(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isascii() or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=NUMBER")
    return name, int(number)


def _dimensions(text: str) -> tuple[str, tuple[str, ...]]:
    glob, _, names = text.rpartition("=")
    found = tuple(name.strip() for name in names.split(","))
    if not glob or not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form GLOB=NAME,NAME")
    return glob, found


def _prefix(text: str) -> str:
    if text and not text.endswith("."):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not end with a dot; write --prefix {text}. or --name {text}"
        )
    return text


def _module(text: str) -> str:
    if not text or text.endswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is not a module's name, as in 'model'")
    return text


def _check_options(args: argparse.Namespace, *, kind: str, wanted: str) -> None:
    """Raise ``ConfigError`` for an option that has no meaning between these two formats."""
    of_target = {
        "--dp": (args.dp, "holdfast"),
        "--compress": (args.compress, "holdfast"),
        "--file-size": (args.file_size, "safetensors"),
        "--duplicate-tied": (args.duplicate_tied, "safetensors"),
        "--named-types": (args.named_types, "zarr"),
        "--dimension-names": (args.dimension_names, "zarr"),
    }
    for option, (given, served) in of_target.items():
        if given and wanted != served:
            raise ConfigError(f"{option} is for {served} targets, and this one is {wanted}")
    if args.tie and kind != "safetensors":
        raise ConfigError(f"--tie is for safetensors sources, and this one is {kind}")
    if (args.set or args.reverse) and not args.patterns:
        raise ConfigError("--set and --reverse are for --patterns, which is missing")
    if args.step is not None and "holdfast" not in (kind, wanted):
        raise ConfigError(f"--step: neither {kind} nor {wanted} has steps; leave it out")


def run(args: argparse.Namespace) -> int:
    """Convert, and print a summary."""
    kind = args.source_format or source_format(args.source)
    wanted = args.target_format or target_format(args.target, kind)
    _check_options(args, kind=kind, wanted=wanted)
    reading = SourceOptions(step=args.step, ties=dict(args.tie))
    with ExitStack() as stack:
        source = FORMATS[kind].source(args.source, reading)
        stack.enter_context(closing(source))
        patterned, told = _patterned(source, args, kind=kind)
        named = _named(patterned, args, kind=kind, wanted=wanted)
        compression_of(args.compress, named.specs, origin=args.source)
        writing = TargetOptions(
            layout=TargetLayout(mesh={DATA_AXIS: args.dp or 1}),
            file_bytes=args.file_size,
            memory_bytes=args.memory,
            duplicate_tied=args.duplicate_tied,
            named_types=args.named_types,
            dimensions=dict(args.dimension_names),
            identity=_identity(source, args),
        )
        sink = stack.enter_context(closing(FORMATS[wanted].sink(args.target, writing)))
        resumes = kind == wanted == "holdfast"
        bar = stack.enter_context(LongWork(_kept(args, resumes=resumes)))
        total = sum(map(nbytes_of, named.specs.values()))
        task = bar.add_task("converting", total=total)
        done = transfer(
            named,
            sink,
            memory_bytes=args.memory,
            progress=lambda n: bar.advance(task, n),
            step=getattr(source, "step", None) if args.step is None else args.step,
        )
    notes = getattr(sink, "notes", ())
    _report(args, done, kind=kind, wanted=wanted, told=told, notes=notes)
    return 0


def _kept(args: argparse.Namespace, *, resumes: bool) -> str:
    next_time = "goes on after the last complete writer" if resumes else "begins anew"
    return (
        f"{args.source} is as before, and {args.target} shows nothing that is half written; the "
        f"same command {next_time}."
    )


def _patterned(
    source: TensorSource, args: argparse.Namespace, *, kind: str
) -> tuple[TensorSource, tuple[str, ...]]:
    """Return what the patterns make of the selected part of a source, and what they say."""
    told = (*getattr(source, "told", ()), *_absent(source))
    if args.select:
        source = selected(source, args.select)
    if not args.patterns:
        return source, told
    if kind == "dcp":  # other names have no place in the nested state that DCP flattened
        from holdfast.adapters.dcp.names import PATHS

        source = Renamed(source, lambda name: None if name.startswith(PATHS) else name)
    patterns = Patterns.read(args.patterns, sizes=dict(args.set), reverse=args.reverse)
    made = PatternedSource(source, patterns)
    return made, tuple(dict.fromkeys((*told, *made.told)))


def _absent(source: TensorSource) -> list[str]:
    """Say how many tensors a run has left out of its checkpoint."""
    count = sum(map(is_digest, source.values.values()))
    words = (
        f"{count} frozen tensors are not in the checkpoint: the run builds them again (Rebuilt), "
        "and the target lacks them, too"
    )
    return [words] if count else []


def _named(
    source: TensorSource, args: argparse.Namespace, *, kind: str, wanted: str
) -> TensorSource:
    """Return the source under the names of the target."""
    prefix = f"{args.name}." if args.name else args.prefix
    if prefix is None and wanted == "safetensors" and kind == "holdfast":
        prefix = f"{the_module(source)}."
    if not prefix:
        return source
    if FORMATS[kind].weights and not FORMATS[wanted].weights:
        return with_prefix(source, prefix)
    return without_prefix(source, prefix)


def _identity(source: TensorSource, args: argparse.Namespace) -> Identity:
    """Return the identity of the source; its content hash covers selection and renaming too."""
    found = getattr(source, "identity", None)
    if not isinstance(found, Identity) or found.content is None:
        return Identity(compression=dict(args.compress or ()))
    if args.compress is not None:
        found = dataclasses.replace(found, compression=dict(args.compress))
    taken: tuple[object, ...] = (found.content, args.select, args.prefix, args.name)
    if args.patterns:
        patterns = Patterns.read(args.patterns, sizes=dict(args.set), reverse=args.reverse)
        taken = (*taken, patterns.file.text, sorted(patterns.sizes.items()), patterns.reverse)
    return dataclasses.replace(found, content=sha256(repr(taken).encode()).hexdigest())


def _report(
    args: argparse.Namespace,
    done: Transferred,
    *,
    kind: str,
    wanted: str,
    told: Sequence[str],
    notes: Sequence[str],
) -> None:
    left_out = 0 if FORMATS[wanted].values else done.values
    if args.json:
        print_json(
            {
                "source": {"path": args.source, "format": kind},
                "target": {"path": args.target, "format": wanted},
                "tensors": done.tensors,
                "tied": done.aliases,
                "values": done.values - left_out,
                "values_left_out": left_out,
                "left_out": list(told),
                "bytes": done.bytes,
                "seconds": done.seconds,
                **({"notes": list(notes)} if notes else {}),
            }
        )
        return
    say(
        f"{args.target}: {done.tensors} tensors, {readable(done.bytes)} in {done.seconds:.1f} s, "
        f"{kind} to {wanted}"
    )
    for words in told:
        say(words)
    if left_out:
        say(f"{left_out} plain values were left out: {wanted} cannot store them")
    for note in notes:
        say(note)
