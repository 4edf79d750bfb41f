"""The rules by which a record follows from those before it. Pure.

A record that its writer should not have written is refused by every reader, so it misleads nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.elastic.sea.known import KnownSea
from holdfast.elastic.sea.records import Dealt, Entered, Founded, Left, Merged, Part, Record


def fault_of(sea: KnownSea, record: Record) -> str:
    """Return the reason why a record does not follow, "" if it does."""
    if record.number != sea.length:
        return f"it says number {record.number} where {sea.length} is next"
    if isinstance(record, Founded) != (sea.founded is None):
        return "a logbook begins with Founded, and has only one"
    match record:
        case Founded(settings=settings, dealt=dealt):
            is_dealt = settings.data == "dealt"
            return "" if is_dealt == (dealt is not None) else "it does not say what it deals"
        case Entered():
            return _fault_of_entered(sea, record)
        case Left():
            return _fault_of_left(sea, record)
        case Merged():
            return (_fault_of_met if sea.is_paired else _fault_of_merged)(sea, record)
        case Dealt():
            return _fault_of_dealt(sea, record)


def _fault_of_entered(sea: KnownSea, record: Entered) -> str:
    if record.island in sea.members:
        return f"{record.island} takes part already"
    if record.tide > sea.tide:
        return f"{record.island} has adopted {record.tide} merges of {sea.tide}"
    if (record.need > 0) != (sea.supply is not None):
        return f"{record.island} needs {record.need} samples of the sea's"
    if sea.is_paired and record.tide < sea.tide:
        return f"{record.island} enters at tide {record.tide}, where {sea.tide} is next"
    if sea.is_over:
        return (
            f"all islands have ended, so {record.island} has nobody to meet; take the weights "
            "at the meeting place, or meet elsewhere"
        )
    if record.lineage == record.number:
        return ""
    if sea.supply is not None:
        return f"{record.island} comes back with work whose samples were given to others"
    former = sea.former.get(record.island)
    if former is None or former.lineage != record.lineage:
        return f"{record.island} never left with work of lineage {record.lineage}"
    return ""


def _fault_of_left(sea: KnownSea, record: Left) -> str:
    if record.island not in sea.members:
        return f"{record.island} takes no part"
    if record.last and (fault := _fault_of_last(sea, record)):
        return fault
    if record.why != "astray":
        return ""
    if sea.is_paired:
        return "islands that meet in pairs have no common weights to be astray of"
    if record.portion >= sea.settings.portions:
        return f"there is no portion {record.portion}"
    if fault := _fault_of_parts(sea, record.seen, record.portion):
        return fault
    if record.island not in sea.astray(record.portion, record.seen):
        return f"the works that it names do not show {record.island} astray"
    return ""


def _fault_of_last(sea: KnownSea, record: Left) -> str:
    if not sea.is_paired or record.why != "done":
        return "there is a last merge only at the end of islands that meet in pairs"
    bases = [(part.island, part.base) for part in record.last]
    tide = sea.members[record.island].tide
    due = [sea.base_of(tide, portion) for portion in range(sea.settings.portions)]
    if bases != [(record.island, base) for base in due]:
        return f"its last works are not those of all portions of {record.island}"
    return ""


def _fault_of_met(sea: KnownSea, record: Merged) -> str:
    islands = [part.island for part in record.parts]
    if not islands or islands != sorted(set(islands)):
        return "its islands are not in order, or one is named twice, or none"
    for island in islands:
        if island not in sea.members:
            return f"{island} takes no part"
        if (due := sea.members[island].tide) != record.tide:
            return f"it is of tide {record.tide} where {due} is the next of {island}"
    if sea.tide == 0 and len(sea.members) < sea.settings.founders:
        return f"{len(sea.members)} islands are there of {sea.settings.founders} founders"
    if record.portion != sea.portion_of(record.tide):
        return f"portion {record.portion} has no tide {record.tide}"
    due_now = sorted([islands[0], *filter(None, [sea.partner(islands[0])])])
    if islands != due_now:
        return f"{', '.join(islands)} met where {', '.join(due_now)} are due"
    base = sea.base_of(record.tide, record.portion)
    if any(part.base != base for part in record.parts):
        return f"its works are not all based on {base} meetings of the portion"
    if record.whole != sum(part.weight for part in record.parts):
        return f"its works do not weigh {record.whole} together"
    return ""


def _fault_of_merged(sea: KnownSea, record: Merged) -> str:
    if (record.tide, record.portion) != (sea.tide, sea.portion):
        return (
            f"it merges portion {record.portion} in tide {record.tide} where portion "
            f"{sea.portion} in tide {sea.tide} is next"
        )
    if sea.tide == 0 and len(sea.members) < sea.settings.founders:
        return f"{len(sea.members)} islands are there of {sea.settings.founders} founders"
    if fault := _fault_of_parts(sea, record.parts, record.portion):
        return fault
    for part in record.parts:
        member = sea.members[part.island]
        fault = sea.fault_of_base(member, record.portion, part.base)
        if fault := fault or sea.fault_of_trained(member, record.portion, part.trained):
            return f"the work of {part.island} {fault}"
    if astray := sea.astray(record.portion, record.parts):
        return f"it names works of {', '.join(astray)}, whose weights are not the sea's"
    if not sea.is_enough(record.parts):
        return f"works of {len(record.parts)} of {len(sea.members)} islands are too few"
    whole = sea.whole(record.parts)
    if record.whole != whole:
        return f"it says that the sea weighs {record.whole} where it weighs {whole}"
    return ""


def _fault_of_dealt(sea: KnownSea, record: Dealt) -> str:
    member = sea.members.get(record.island)
    if sea.supply is None or not sea.supply.is_open:
        return "the logbook does not deal samples yet"
    if member is None:
        return f"{record.island} takes no part"
    if record.upto <= member.dealt:
        return f"{record.island} has {member.dealt} samples, and wants {record.upto}"
    if sea.supply.left == 0:
        return "all samples are dealt"
    return ""


def _fault_of_parts(sea: KnownSea, parts: Sequence[Part], portion: int) -> str:
    islands = [part.island for part in parts]
    if islands != sorted(set(islands)):
        return "its islands are not in order, or one is named twice"
    for part in parts:
        if part.island not in sea.members:
            return f"{part.island} takes no part"
        if part.base > sea.merges(portion):
            return f"{part.island} says {part.base} merges of {sea.merges(portion)}"
    return ""
