"""The truth of a simulated sea: what its logbook may say, judged by a second, plain reading."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from holdfast.ckpt.errors import InternalError
from holdfast.elastic.sea.records import SeaSettings
from holdfast.elastic.testing.seas import ledger
from holdfast.elastic.testing.seas.ledger import Units
from holdfast.elastic.testing.seas.store import Files

LATELY_S: Final = 6.0
"""An island may not know yet what others did within the last seconds."""


class SeaFaultError(InternalError):
    """The sea broke a promise."""


class Oracle:
    """Reads every record when it is written, and judges what islands do.

    ``exact``: a step that is executed again makes the same work. ``unable_s(island)`` returns for
    how many of the last seconds, twice ``patience_s``, the island could not act. ``astray`` are
    islands whose weights were damaged, ``stateless`` those that once lost everything;
    ``is_lost(island)`` is true if no other island has the sea's weights, or all have left.
    """

    def __init__(
        self,
        files: Files,
        settings: SeaSettings,
        *,
        exact: bool,
        unable_s: Callable[[str], float],
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self.files, self._settings, self._exact = files, settings, exact
        self._unable_s, self._patience_s = unable_s, patience_s
        self.records: list[dict[str, Any]] = []
        self._raw: dict[str, bytes] = {}
        self.members: dict[str, int] = {}
        self._lineages: dict[str, int] = {}
        self._entered_s: dict[str, float] = {}
        self._step_us: dict[str, int] = {}
        self._strides: list[dict[str, int]] = [{}]
        self.left: Counter[str] = Counter()
        self.tide = 0
        portions = range(settings.portions)
        self.weights: list[dict[str, int]] = [{} for _ in portions]
        self.digests = [[ledger.digest({})] for _ in portions]
        self._units: defaultdict[tuple[str, int, int, int], int] = defaultdict(int)
        self.astray: set[str] = set()
        self.stateless: set[str] = set()
        self._streams: defaultdict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self._in_sea: Counter[tuple[str, int, int]] = Counter()
        self._trained_s: dict[str, float] = {}
        self._returned_s = -math.inf
        self._done = set[str]()
        self.is_lost: Callable[[str], bool] = lambda _: False
        files.watch = self._written

    @property
    def final(self) -> str:
        """The digest of all of the sea's weights."""
        return ledger.digest(self.weights)

    @property
    def is_over(self) -> bool:
        """True once nobody can enter any more, not even with a state."""
        return False

    def state(self, portion: int, base: int, island: str) -> str:
        """Return the right digest of a portion after ``base`` merges of it, as an island has it."""
        return self.digests[portion][base]

    def place(self, island: str, sea: Sequence[Mapping[str, int]]) -> None:
        """Note the weights with which an island entered."""

    def payload(self, island: str, digest: str) -> bytes:
        """Return a payload. Raises ``SeaFaultError`` if there is none."""
        name = f"payloads/{island}/{digest}"
        if name not in self.files.data:
            raise SeaFaultError(f"record {len(self.records)} names {name}, which is not there")
        return self.files.data[name]

    def check_stride(self, island: str, tide: int, steps: int) -> None:
        """Judge the steps between two tides of an island that has adopted ``tide`` merges."""
        full = self._settings.every // self._settings.portions
        right = self._strides[tide].get(island, full)
        if steps != right:
            raise SeaFaultError(
                f"{island} took {steps} steps to its tide after {tide} merges, agreed are {right}"
            )

    def trains(self, island: str, lineage: int, first: int, positions: list[int]) -> None:
        """Judge the samples that a lineage trains after ``first`` others: always the same ones."""
        known = self._streams[island, lineage]
        if island in self.members and self._lineages[island] == lineage:
            self._trained_s[island] = self._clock()
        for at, position in enumerate(positions, start=first):
            if known.setdefault(at, position) != position:
                raise SeaFaultError(
                    f"{island} trains sample {position} as number {at} of lineage {lineage}; it "
                    f"was {known[at]}"
                )

    def check_samples(self, total: int, *, free: set[int]) -> None:
        """Judge that every sample is in the sea once, at its end.

        Some may be missing if an island did not come to its end, and no other trained after the
        last one that gave samples back. The records must say that these are ``free``.
        """
        portions = range(self._settings.portions)
        whole, part = Counter[int](), Counter[int]()
        for (island, lineage), stream in self._streams.items():
            upto = [self._in_sea[island, lineage, portion] for portion in portions]
            for at, position in stream.items():
                whole[position] += at < min(upto)
                part[position] += at < max(upto)
        if twice := [at for at, count in whole.items() if count > 1]:
            raise SeaFaultError(f"samples {twice[:5]} are in the sea more than once")
        missing = sorted(set(range(total)) - {at for at, count in whole.items() if count})
        never = -math.inf
        trained_s = max((self._trained_s.get(each, never) for each in self._done), default=never)
        if untold := [at for at in missing if at not in free]:
            raise SeaFaultError(f"samples {untold[:5]} are neither in the sea nor told missing")
        if missing and trained_s > self._returned_s + LATELY_S:
            raise SeaFaultError(f"{len(missing)} samples are not in the sea: {missing[:5]}")
        doubled = [at for at, count in part.items() if count > 1]
        if doubled and self._returned_s < 0:
            raise SeaFaultError(f"samples {doubled[:5]} are in some portion more than once")

    def _agreed_strides(self) -> dict[str, int]:
        """Return the steps to the next tide of the members, by the speeds in the records."""
        settings = self._settings
        full = settings.every / settings.portions
        known = {
            island: self._step_us[island] for island in self.members if island in self._step_us
        }
        if settings.least_every is None or not known:
            return {}
        least, fastest = settings.least_every // settings.portions, min(known.values())
        return {
            island: max(least, math.floor(full * fastest / own + 0.5))
            for island, own in known.items()
        }

    def check_ends(self, finals: AbstractSet[str | None]) -> None:
        """Judge the weights with which islands ended, at times of their own."""

    # -- inside ----------------------------------------------------------------------------------

    def _written(self, name: str, data: bytes) -> None:
        if not name.startswith("logbook/"):
            return
        if name in self._raw:
            raise SeaFaultError(f"{name} was written twice")
        self._raw[name] = data
        record = json.loads(data)
        number = int(name.removeprefix("logbook/").removesuffix(".json"))
        if number != len(self.records) or record["number"] != number:
            raise SeaFaultError(f"{name} is record {record['number']}, due is {len(self.records)}")
        match record["kind"]:
            case "founded":
                if number:
                    raise SeaFaultError("the sea was founded twice")
            case "entered":
                self._entered(record)
            case "left":
                self._left(record)
            case "merged":
                self._merged(record)
        self.records.append(record)

    def _entered(self, record: dict[str, Any]) -> None:
        island = record["island"]
        if island in self.members:
            raise SeaFaultError(f"{island} entered twice")
        if record["lineage"] not in (record["number"], self._lineages.get(island)):
            raise SeaFaultError(
                f"{island} comes back with lineage {record['lineage']}, not its own"
            )
        self.members[island] = record["weight"]
        self._entered_s[island] = self._clock()
        self._lineages[island] = record["lineage"]
        self._step_us.pop(island, None)

    def _left(self, record: dict[str, Any]) -> None:
        island, why = record["island"], record["why"]
        if self.members.pop(island, None) is None:
            raise SeaFaultError(f"{island} left, but took no part")
        self.left[why] += 1
        if why == "done":
            self._done.add(island)
        if why != "done" or self._settings.share is not None or self._returned_s > 0:
            # One at its last steps may have been dealt what another gave back: it gives it back.
            self._returned_s = self._clock()
        if why == "silent":
            self._silent(island)
            self.stateless.add(island)  # the others may remove what it would need
        if why == "lost" and island not in self.stateless:
            raise SeaFaultError(f"{island} begins anew, but has its state")
        if why == "astray" and island not in self.astray:
            raise SeaFaultError(f"{island} was put out as astray; its weights were right")

    def _silent(self, island: str) -> None:
        """Judge that an island was put out.

        One that came back seconds ago may be; one that entered seconds ago may not. An island that
        was stopped itself may have decided long ago.
        """
        now_s = self._clock()
        before = [at_s for at_s in self.files.wrote_s[island] if at_s <= now_s - LATELY_S]
        silent_s = now_s - max([*before[-1:], self._entered_s[island]])
        if self._unable_s(self.files.writer) == 0 and silent_s < 0.9 * self._patience_s:
            raise SeaFaultError(f"{island} was put out after {silent_s:.1f} s")

    def _merged(self, record: dict[str, Any]) -> None:
        parts, portion = record["parts"], record["portion"]
        if (record["tide"], portion) != (self.tide, self.tide % self._settings.portions):
            raise SeaFaultError(f"tide {record['tide']} was merged, due is {self.tide}")
        if len({part["island"] for part in parts}) != len(parts):
            raise SeaFaultError(f"tide {self.tide} names an island twice")
        if self.tide == 0 and len(self.members) < self._settings.founders:
            raise SeaFaultError("the first tide did not wait for the founders")
        here = {part["island"]: part["weight"] for part in parts}
        if absent := here.keys() - self.members.keys():
            raise SeaFaultError(f"tide {self.tide} names {sorted(absent)}, who took no part")
        self.members.update(here)
        whole = sum(self.members.values())
        if record["whole"] != whole:
            raise SeaFaultError(f"tide {self.tide} weighs {record['whole']}, its members {whole}")
        least = len(self.members) if self._settings.share is None else 1
        if len(parts) < least:
            raise SeaFaultError(f"tide {self.tide} did not wait for all")
        for part in parts:
            if part["state"] != self.state(portion, part["base"], part["island"]):
                raise SeaFaultError(f"{part['island']} states wrong weights of portion {portion}")
            self._add(part, portion)
        self._step_us.update({p["island"]: p["step_us"] for p in parts if p["step_us"]})
        self._strides.append(self._agreed_strides())
        self.digests[portion].append(ledger.digest(self.weights[portion]))
        self.tide += 1

    def _add(self, part: dict[str, Any], portion: int) -> None:
        units = self._counted(part, portion)
        sums = self.weights[portion]
        sums[part["island"]] = sums.get(part["island"], 0) + sum(units.values())

    def _counted(self, part: dict[str, Any], portion: int) -> Units:
        """Return the units of a work, each of which was never merged before."""
        payload = self.payload(part["island"], part["digest"])
        island, lineage, units, trained = ledger.unpacked(payload)
        if (island, lineage) != (part["island"], self._lineages[island]):
            raise SeaFaultError(f"tide {self.tide} merges work of {island} from lineage {lineage}")
        if part["trained"] != trained:
            raise SeaFaultError(f"{island} says {part['trained']} samples, its work has {trained}")
        self._in_sea[island, lineage, portion] = trained
        if ledger.FAULT in units:
            raise SeaFaultError(f"tide {self.tide} has a fault that the guard of {island} undid")
        for step, q in units.items():
            key = island, lineage, step, portion
            self._units[key] += q
            most = ledger.quantity(island, step, portion)
            if self._exact and not 0 <= self._units[key] <= most:
                raise SeaFaultError(
                    f"tide {self.tide}: {self._units[key]} of the {most} of step {step} of "
                    f"{island} are in the sea"
                )
        return units
