"""An island's numbers, which are part of the run's state beside the sea's weights."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.ckpt.types import learn
from holdfast.elastic.errors import ConfigError
from holdfast.elastic.sea.dealing import Blocks
from holdfast.elastic.sea.portions import last_of, merges_of
from holdfast.elastic.sea.records import Work
from holdfast.elastic.sea.settings import Islands

NONE: Final = -1
_MARKS: Final = 128


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A work under way: taken after ``step`` steps and ``samples`` samples of this run."""

    tide: int
    portion: int
    step: int
    digest: str
    nbytes: int
    weight: int
    samples: int
    base: int
    state: str
    step_us: int = 0
    trained: int = 0


class IslandNumbers(msgspec.Struct, kw_only=True):
    """The numbers of an island.

    ``lineage`` is that of its `Entered`, -1 before it; ``entered`` counts the merges before that.
    ``adopted`` counts those that it has adopted, ``bases`` those of each portion, and ``states``
    are the digests after them.
    ``samples`` are those trained so far; ``since`` has for each portion the number at its last
    merged work, ``named`` the base after that merge. ``sents`` are the works under way; ``pace``
    is the number of merges that the last arrival adopted. ``marks`` are [step, adopted] of late.
    ``place`` is that in the logbook after the merges adopted, "" at its begin. ``departs`` is the
    step of the next tide where islands take steps by their speed.
    Of the samples that the logbook deals, this lineage has got ``dealt`` and trained ``taken``;
    ``blocks`` are the others. It wants to have ``need`` in hand. ``over``: it has dropped its own
    work at its last step, so it trains no more.
    """

    island: str
    lineage: int = NONE
    entered: int = 0
    adopted: int = 0
    samples: int = 0
    pace: int = 1
    sents: list[Sent] = []
    bases: list[int] = []
    states: list[str] = []
    since: list[int] = []
    named: list[int] = []
    marks: list[tuple[int, int]] = []
    place: str = ""
    departs: int = 0
    need: int = 0
    dealt: int = 0
    taken: int = 0
    blocks: Blocks = ()
    over: bool = False


class IslandCounters:
    """The numbers as an object that a run can track."""

    def __init__(self, island: str, *, portions: int) -> None:
        zeros = [0] * portions
        self.now = IslandNumbers(
            island=island,
            bases=[*zeros],
            states=[""] * portions,
            since=[*zeros],
            named=[*zeros],
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        found: dict[str, Any] = msgspec.to_builtins(self.now)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state. Raises ``ConfigError`` if it is another island's."""
        saved = msgspec.convert(state, IslandNumbers)
        if saved.island != self.now.island:
            raise ConfigError(
                f"the saved state is that of the island {saved.island!r}, this one is "
                f"{self.now.island!r}: its samples and its place in the sea belong to the name; "
                f"give Islands(name={saved.island!r}), or another checkpoint directory"
            )
        if len(saved.bases) != len(self.now.bases):
            raise ConfigError(
                f"the saved island has {len(saved.bases)} portions, this one "
                f"{len(self.now.bases)}; give Islands(portions={len(saved.bases)})"
            )
        self.now = saved

    def begin_anew(self, *, keeps: bool = False) -> None:
        """Forget the sea; the samples are counted on. With ``keeps`` the weights are the sea's."""
        zeros = [0] * len(self.now.bases)
        now = self.now
        now.lineage, now.sents, now.marks = NONE, [], []
        now.dealt = now.taken = 0
        now.blocks, now.over = (), False
        now.pace = 1
        if not keeps:
            now.adopted = now.entered = 0
            now.place = ""
            now.bases = [*zeros]
        now.named = [*now.bases]
        now.since = [now.samples for _ in zeros]

    def weight(self, portion: int, *, least: int = 1) -> int:
        """Return the samples that were trained for a portion in each of its merges.

        They are those since its last merged work.
        """
        now = self.now
        rounds = 1 + max(0, now.bases[portion] - now.named[portion])
        return max(least, (now.samples - now.since[portion]) // rounds)

    def due(self) -> list[int]:
        """Return the portions that are sent now: as many as were merged since the last time.

        So a slow island, which adopts several merges at once, sends each portion as often.
        """
        portions = len(self.now.bases)
        return [(self.now.adopted + each) % portions for each in range(self.now.pace)]

    def departs(self, step: int, islands: Islands) -> bool:
        """Return whether a tide begins at the end of this step."""
        if islands.least_every is None:
            return step % islands.stride == 0
        return step >= self.now.departs and not self.now.sents

    def note_departed(
        self, portion: int, *, step: int, digest: str, nbytes: int, step_us: int = 0
    ) -> Sent:
        """Note that a portion's payload is under way, after so many steps; return its work."""
        now = self.now
        sent = Sent(
            tide=now.adopted,
            portion=portion,
            step=step,
            digest=digest,
            nbytes=nbytes,
            weight=self.weight(portion),
            samples=now.samples,
            base=now.bases[portion],
            state=now.states[portion],
            step_us=step_us,
            trained=now.taken,
        )
        now.sents.append(sent)
        return sent

    def work_of(self, sent: Sent, *, last: bool = False) -> Work:
        """Return a work under way as it is published; ``last``: for the last merge."""
        portions = len(self.now.bases)
        return Work(
            island=self.now.island,
            lineage=self.now.lineage,
            tide=sent.tide,
            portion=last_of(sent.portion, portions=portions) if last else sent.portion,
            weight=sent.weight,
            digest=sent.digest,
            nbytes=sent.nbytes,
            base=sent.base,
            state=sent.state,
            step_us=sent.step_us,
            trained=sent.trained,
        )

    def note_arrived(self, adopted: int, *, place: str = "", stride: int = 0) -> None:
        """Note that an arrival adopted so many merges; nothing is under way then.

        ``stride`` are the steps from its tide to the next.
        """
        if self.now.sents and stride:
            self.now.departs = self.now.sents[0].step + stride
        self.now.sents = []
        self.now.pace = min(max(1, adopted), len(self.now.bases))
        self.now.place = place or self.now.place

    def note_adopted(self, portion: int, *, state: str, step: int, named: bool) -> None:
        """Count a merge of a portion; ``named``: own work is in it."""
        now = self.now
        now.adopted += 1
        now.bases[portion] += 1
        now.states[portion] = state
        if named:
            now.named[portion] = now.bases[portion]
            sent = [each.samples for each in now.sents if each.portion == portion]
            now.since[portion] = sent[0] if sent else now.samples
        now.marks = [*now.marks, (step, now.adopted)][-_MARKS:]

    def skip_to(self, tide: int, *, step: int) -> None:
        """Count on from a later tide, where islands meet in pairs; own work stays."""
        portions = len(self.now.bases)
        now = self.now
        now.adopted, now.sents = tide, []
        now.bases = [merges_of(portion, tide, portions=portions) for portion in range(portions)]
        now.named = list(now.bases)
        now.marks = [*now.marks, (step, tide)][-_MARKS:]

    def adopted_at(self, step: int) -> int:
        """Return the merges that the state after ``step`` steps had adopted, or fewer."""
        found = [adopted for at, adopted in self.now.marks if at <= step]
        return found[-1] if found else self.now.entered


learn(globals())
