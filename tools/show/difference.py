"""The result of `holdfast diff`, as a value and as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.ckpt.inspect.compare import Number, Peak, Tally, Tolerance, ValueDifference
from holdfast.ckpt.inspect.differ import KindDifference, TensorComparison
from holdfast.ckpt.types import learn
from holdfast.tools.terminal import readable, shape_text

_SHOWN: Final = 20
_DETAILED: Final = 4
"""Up to this many tensors are shown with all notable places, more as a table."""


class SideInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One of the two checkpoints."""

    path: str
    step: int
    run: str
    mesh: dict[str, int]


class CheckpointDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison. ``tolerance`` is None if bits had to be equal."""

    a: SideInfo
    b: SideInfo
    tolerance: Tolerance | None
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    kinds: tuple[KindDifference, ...] = ()
    tensors: tuple[TensorComparison, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    notes: tuple[str, ...] = ()
    compared_bytes: int = 0

    def differs(self, tensor: TensorComparison) -> bool:
        """Say whether a tensor that both have differs by more than allowed."""
        found = tensor.tally
        return bool(found.differing if self.tolerance is None else found.outside)

    @property
    def same(self) -> bool:
        """True if nothing differs by more than allowed."""
        missing = self.only_a or self.only_b or self.kinds or self.values
        return not missing and not any(map(self.differs, self.tensors))


def show(found: CheckpointDifference, *, console: Console, full: bool) -> None:
    """Print missing names, then differences, then a summary in one line."""
    limit = None if full else _SHOWN
    for letter, side in (("A", found.a), ("B", found.b)):
        mesh = " x ".join(f"{axis}={n}" for axis, n in side.mesh.items()) or "no mesh"
        console.print(Text.assemble((f"{letter}  ", "bold"), f"{side.path}, {mesh}"))
    _list(console, "only in A", "red", list(found.only_a), limit)
    _list(console, "only in B", "green", list(found.only_b), limit)
    _list(console, "of another kind (A -> B)", "yellow", list(map(_kind, found.kinds)), limit)
    different = [tensor for tensor in found.tensors if found.differs(tensor)]
    if different:
        console.print(Text(f"\ntensors that differ ({len(different)})", "bold yellow"))
        if len(different) > _DETAILED and not full:
            _table(console, different[:limit], found.tolerance)
        else:
            for tensor in different:
                _tensor(console, tensor, found.tolerance)
    _more(console, len(different), limit)
    values = [_value(value) for value in found.values]
    _list(console, "plain values that differ (A -> B)", "yellow", values, limit)
    for note in found.notes:
        console.print(Text(f"\nnote: {note}", "dim"))
    console.print(Text(f"\n{summary(found)}", "green" if found.same else "bold red"))


def _list(console: Console, title: str, style: str, lines: list[str], limit: int | None) -> None:
    if not lines:
        return
    console.print(Text(f"\n{title} ({len(lines)})", f"bold {style}"))
    for line in lines[:limit]:
        console.print(Text(f"  {line}"), overflow="fold")
    _more(console, len(lines), limit)


def _more(console: Console, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        console.print(Text(f"  … and {count - limit} more (--full shows all)", "dim"))


def _kind(kind: KindDifference) -> str:
    one = f"{kind.dtype_a} {shape_text(kind.shape_a)}"
    return f"{kind.name}: {one} -> {kind.dtype_b} {shape_text(kind.shape_b)}"


def _value(value: ValueDifference) -> str:
    def text(side: object) -> str:
        return "(absent)" if side is msgspec.UNSET else msgspec.json.encode(side).decode()

    return f"{value.path}: {text(value.a)} -> {text(value.b)}"


def _count(tensor: TensorComparison, tolerance: Tolerance | None) -> int:
    return tensor.tally.differing if tolerance is None else tensor.tally.outside


def _share(count: int, elements: int) -> str:
    """Return a share in percent; it reads "all" or "none" only if that is exact."""
    if count in (0, elements):
        return "all" if count else "none"
    percent = 100 * count / elements
    if percent < 0.1:
        return "< 0.1 %"
    return "> 99.9 %" if percent > 99.9 else f"{percent:.1f} %"


def _table(console: Console, tensors: list[TensorComparison], tolerance: Tolerance | None) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("  tensor", overflow="fold")
    for title in ("differ", "largest |a-b|", "relative"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("at", no_wrap=True)
    for tensor in tensors:
        peak = tensor.tally.largest or tensor.tally.first
        row = [_share(_count(tensor, tolerance), tensor.tally.elements)]
        if peak is not None:
            row += [f"{peak.absolute:.3g}", f"{peak.relative:.2g}", str(list(peak.index))]
        table.add_row(f"  {tensor.name}", *row)
    console.print(table, markup=False)


def _tensor(console: Console, tensor: TensorComparison, tolerance: Tolerance | None) -> None:
    found, count = tensor.tally, _count(tensor, tolerance)
    beyond = "" if tolerance is None else " beyond the tolerance"
    line = Text.assemble(
        (f"  {tensor.name}  ", "bold"),
        (f"{tensor.dtype} {shape_text(tensor.shape)}  ", "dim"),
        f"{count:,} of {found.elements:,} differ{beyond} ({_share(count, found.elements)})",
    )
    console.print(line)
    for peak, names in _places(found):
        text = f"    {names}at {list(peak.index)}: {number(peak.a)} -> {number(peak.b)}"
        how = f"  |a-b| {peak.absolute:.3g}, relative {peak.relative:.3g}"
        how = "" if math.isnan(peak.absolute) else how
        console.print(Text.assemble(text, (how, "dim")))
    if found.nan_a or found.nan_b:
        console.print(Text(f"    NaN in A only: {found.nan_a:,}, in B only: {found.nan_b:,}"))


def _places(found: Tally) -> Iterable[tuple[Peak, str]]:
    """Return the notable places, each once, with the reasons why it is notable."""
    names: dict[tuple[int, ...], tuple[Peak, list[str]]] = {}
    for name, peak in (
        ("first", found.first),
        ("largest", found.largest),
        ("largest relative", found.largest_relative),
    ):
        if peak is not None:
            names.setdefault(peak.index, (peak, []))[1].append(name)
    if found.differing == 1:
        return [(peak, "") for peak, _ in names.values()]
    return [(peak, ", ".join(words) + " ") for peak, words in names.values()]


def number(value: Number) -> str:
    """Return a number for people; floats get nine digits, which tell any two float32 apart."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def summary(found: CheckpointDifference) -> str:
    """Return the result in one sentence."""
    equal = sum(not tensor.tally.differing for tensor in found.tensors)
    beyond = sum(map(found.differs, found.tensors))
    unread = sum(not tensor.read for tensor in found.tensors)
    parts = [f"{equal} of {len(found.tensors)} tensors equal bit for bit"]
    if found.tolerance is not None:
        parts.append(f"{len(found.tensors) - equal - beyond} within tolerance")
    if unread:
        parts.append(f"{unread} of them by recorded checksums only, which is no proof")
    if beyond:
        parts.append(f"{beyond} different")
    if missing := len(found.only_a) + len(found.only_b) + len(found.kinds):
        parts.append(f"{missing} names that cannot be compared")
    if found.values:
        parts.append(f"{len(found.values)} plain values different")
    verdict = "same" if found.same else "different"
    return f"{verdict}: {', '.join(parts)} ({readable(found.compared_bytes)} compared)"


learn(globals())
