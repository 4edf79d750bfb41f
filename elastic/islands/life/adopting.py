"""The adoption of a merge on all ranks."""

from __future__ import annotations

from holdfast.elastic.events import TideAdopted
from holdfast.elastic.islands.commands import AdoptMerge
from holdfast.elastic.islands.life.contact import Contact
from holdfast.elastic.islands.life.parts import IslandParts
from holdfast.elastic.islands.tensors import Merge


def adopt(parts: IslandParts, contact: Contact, said: AdoptMerge, *, waited_s: float = 0.0) -> None:
    """Move the sea's weights by a merge, and count it; collective.

    ``waited_s`` are the seconds for which training waited for it.
    """
    p, named = parts, said.own >= 0
    merge = Merge(portion=said.portion, weights=said.weights, whole=said.whole, own=said.own)
    p.tensors.adopt(merge, p.together.data)
    p.together.data = []
    (state,) = p.tensors.digests([said.portion])
    p.counters.note_adopted(said.portion, state=state, step=p.step, named=named)
    moved = contact.adopted(said.tide)
    p.emit(
        TideAdopted(
            tide=said.tide,
            portion=said.portion,
            step=p.step,
            islands=len(said.weights),
            whole=said.whole,
            named=named,
            state=state,
            waited_s=waited_s,
            fetched_bytes=p.mailbox.fetched,
            bytes=moved.fetched_bytes,
            seconds=moved.seconds,
            direct_bytes=moved.direct_bytes,
        )
    )
