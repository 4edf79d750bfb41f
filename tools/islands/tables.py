"""The status of a sea, and the outcome of a replay, as text for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.elastic.islands.messages import Sign
from holdfast.tools.islands.lines import LineStatus
from holdfast.tools.islands.replay import Outcome, Replayed
from holdfast.tools.islands.samples import SamplesVerdict
from holdfast.tools.islands.status import MemberStatus, SeaStatus
from holdfast.tools.terminal import readable

_NONE = "–"
_COLUMNS = (
    "weight",
    "share",
    "next work",
    "step",
    "merges",
    "waits",
    "sent",
    "fetched",
    "line up",
    "line down",
    "last sign of life",
)
_WHY = {
    "done": "its run is over",
    "silent": "it was silent for too long",
    "astray": "its weights were not the sea's",
    "lost": "it had lost its state",
}


def sea_view(found: SeaStatus) -> RenderableType:
    """Return the summary, a table of the members, and what the lines must carry."""
    parts: list[RenderableType] = [Text(summary(found), style="bold")]
    if found.members:
        parts.append(_members(found))
    parts += [Text(f"{each.island} left: {_WHY[each.why]}") for each in found.former]
    parts += [Text(f"{each} asks for the sea's weights", "yellow") for each in found.asking]
    parts += [Text(line) for line in _lines(found)]
    parts += [
        Text(_too_slow(each.island, way), "yellow")
        for each in found.members
        for way in (each.up, each.down)
        if not way.fits
    ]
    return Group(*parts)


def summary(found: SeaStatus) -> str:
    """Return one line: how far the sea is, and whom it waits for."""
    head = f"sea {found.sea}: {_count(len(found.members), 'island')}, {_count(found.tide, 'merge')}"
    if not found.members:
        return f"{head}; all have left"
    after = f"{head}; the next is of portion {found.portion} and"
    if not found.waits_for:
        return f"{after} is due now"
    names = ", ".join(found.waits_for)
    if found.share is not None and len(found.waits_for) < len(found.members):
        return f"{after} has no work of {names} yet (a quorum of {found.share:.0%} is enough)"
    return f"{after} waits for {names}"


def _members(found: SeaStatus) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("island", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.members:
        table.add_row(
            each.island,
            f"{each.weight:,}",
            f"{each.share:.0%}",
            _NONE if each.work_bytes is None else readable(each.work_bytes),
            *_of_sign(each.sign),
            _line(each.up),
            _line(each.down),
            _heard(each, listened_s=found.listened_s),
            style="" if each.heard_s is not None else "yellow",
        )
    return table


def _of_sign(sign: Sign | None) -> tuple[str, ...]:
    if sign is None:
        return (_NONE,) * 5
    return (
        f"{sign.step:,}",
        f"{sign.tide:,}",
        f"{sign.waiting_s:.1f} s" if sign.waiting_s else "trains",
        readable(sign.sent_bytes),
        readable(sign.fetched_bytes),
    )


def _line(way: LineStatus) -> str:
    """Return the rate that tides need, of the one that the line gives."""
    if way.needed is None and way.given is None:
        return _NONE
    needed = _NONE if way.needed is None else _mbit(way.needed)
    return f"{needed} of {_NONE if way.given is None else _mbit(way.given)} Mbit/s"


def _mbit(bytes_per_s: float) -> str:
    """Return megabits per second, with two digits that count."""
    mbit = 8 * bytes_per_s / 1e6
    return f"{mbit:,.0f}" if mbit >= 10 else f"{mbit:.2g}"


def _too_slow(island: str, way: LineStatus) -> str:
    assert way.given
    return (
        f"{island}: a tide of {readable(way.tide_bytes)} {way.way} takes {way.passes_s:.1f} s of "
        f"its line of {_mbit(way.given)} Mbit/s, and one comes every {way.tide_s:.1f} s: training "
        "waits for it; raise every, take fewer bits, or get a faster line"
    )


def _heard(member: MemberStatus, *, listened_s: float) -> str:
    if member.heard_s is not None:
        return f"within {member.heard_s:.1f} s"
    return "never" if member.sign is None else f"not in {listened_s:.1f} s"


def _lines(found: SeaStatus) -> list[str]:
    steps = found.every // found.portions
    lines = [
        "line: what tides need, of what the line gives (declared or measured, the smaller one)",
        f"a tide every {_count(steps, 'step')}, of {_count(found.portions, 'portion')} of "
        f"{_count(found.elements, 'parameter')} in {found.bits} bits: an island sends "
        f"{readable(found.sent_bytes)} and receives as much from each of the others",
    ]
    if (tide_s := found.tide_s) is not None:
        lines.append(
            f"a tide took {tide_s:.1f} s while this command listened: the line of an island "
            f"carries {readable(found.sent_bytes / tide_s)}/s up and "
            f"{readable(found.received_bytes / tide_s)}/s down"
        )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


_MEANINGS: dict[Outcome, str] = {
    "verified": "repeated, and the digest is the one that islands state",
    "repeated": "repeated; nobody has stated the digest of the result yet",
    "differs": "repeated, and the digest is another one",
    "damaged": "a payload is damaged",
    "no payload": "not repeated: its payloads were removed",
    "no weights": "not repeated: the weights before it are not known",
    "earlier": "not repeated: the checkpoint has it",
}
_WRONG = ("differs", "damaged")


def replay_view(sea: str, found: Sequence[Replayed], *, ends_equal: bool | None) -> RenderableType:
    """Return a line for each outcome with its merges, and one for each that is wrong.

    ``ends_equal``: the weights that the last island left are those of the replay, None if they were
    not compared.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("merges", justify="right", no_wrap=True)
    table.add_column("tides", overflow="fold")
    table.add_column("", overflow="fold")
    for outcome, meaning in _MEANINGS.items():
        if tides := [each.tide for each in found if each.outcome == outcome]:
            style = "red" if outcome in _WRONG else "green" if outcome == "verified" else ""
            table.add_row(f"{len(tides):,}", ranges(tides), meaning, style=style)
    parts: list[RenderableType] = [
        Text(f"sea {sea}: {_count(len(found), 'merge')}", style="bold"),
        table,
        *(
            Text(f"tide {each.tide}, portion {each.portion}: {each.why}", "red")
            for each in found
            if each.outcome in _WRONG
        ),
    ]
    if ends_equal is not None:
        said = "are" if ends_equal else "are not"
        parts.append(
            Text(
                f"the weights that the last island left {said} those of the replay, bit for bit",
                "green" if ends_equal else "red",
            )
        )
    return Group(*parts)


def samples_view(sea: str, found: SamplesVerdict) -> RenderableType:
    """Return a line for each epoch and each lineage, and what is wrong."""
    epochs = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("epoch", "samples", "merged", "in hand", "not dealt"):
        epochs.add_column(name, justify="right", no_wrap=True)
    for epoch in found.epochs:
        cells = (epoch.epoch, epoch.samples, epoch.merged, epoch.held, epoch.free)
        epochs.add_row(*(f"{cell:,}" for cell in cells))
    islands = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    islands.add_column("island", no_wrap=True)
    for name in ("entered in record", "dealt", "merged"):
        islands.add_column(name, justify="right", no_wrap=True)
    for each in found.lineages:
        numbers = [f"{number:,}" for number in (each.lineage, each.dealt, each.merged)]
        islands.add_row(each.island, *numbers, style="" if each.takes_part else "dim")
    trained = [
        Text(
            f"{island} trained all of its merged samples, and {count:,} that are not in all "
            "portions"
        )
        for island, count in found.trained.items()
    ]
    head = Text(f"sea {sea}: the samples that its logbook deals", style="bold")
    end = [Text(each, "red") for each in found.wrong] or [Text(_held(found), "green")]
    return Group(head, epochs, islands, *trained, *end)


def _held(found: SamplesVerdict) -> str:
    if found.is_over:
        return "no sample is merged twice, and none of a full epoch is missing"
    return "no sample is merged twice, and each is merged, in one hand, or not dealt yet"


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: ``0-3, 7``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, each)) for each in found)
