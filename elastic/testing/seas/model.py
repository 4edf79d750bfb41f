"""A model of an island's run: the production courier, entrance and arrivals around a ledger.

It does between steps what `holdfast.elastic.islands.island` does, with integers for tensors.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from concurrent.futures import Future
from random import Random
from typing import Final, TypeVar

from holdfast.ckpt.errors import StoreError
from holdfast.elastic.data.hand import Hand
from holdfast.elastic.errors import SeaError
from holdfast.elastic.islands.arriving import Arrival, Asking
from holdfast.elastic.islands.commands import (
    AdoptMerge,
    AwaitNews,
    EnterAnew,
    GiveWeights,
    GoOn,
    LoadWeights,
    SkipTides,
)
from holdfast.elastic.islands.counters import NONE, IslandCounters, Sent
from holdfast.elastic.islands.courier import Courier, Outgoing
from holdfast.elastic.islands.entering import Entrance, returning
from holdfast.elastic.islands.haul.freight import Freight, carry_out
from holdfast.elastic.islands.held import HeldWorks
from holdfast.elastic.islands.logbook import SeaLogbook
from holdfast.elastic.islands.mailbox import Mailbox, digest_of
from holdfast.elastic.islands.messages import Given, Sign
from holdfast.elastic.islands.pace import OwnPace
from holdfast.elastic.sea.records import Parameter
from holdfast.elastic.testing.seas import ledger
from holdfast.elastic.testing.seas.oracle import SeaFaultError
from holdfast.elastic.testing.seas.process import ModelIsland, RunState
from holdfast.elastic.testing.seas.tasks import SeaTask

SAMPLES: Final = 8
_FAULT: Final = 1 << 20
_APART: Final = 3
"""Records between two places for newcomers: few, as these seas are short."""

_T = TypeVar("_T")

PARAMETERS: Final = tuple(Parameter(name=f"w{i}", shape=(4,)) for i in range(4))


class SeaLife:
    """One life of the process."""

    def __init__(self, model: ModelIsland, state: RunState) -> None:
        self._m, self._s = model, state
        self._islands = model.islands
        self._counters = IslandCounters(model.name, portions=model.islands.portions)
        self._counters.now = state.numbers
        self._mailbox = Mailbox(model.store)  # type: ignore[arg-type]
        self._logbook = self._first_page()
        self._attempt = 0 if model.exact else model.attempts
        self._courier: Courier | None = None
        self._held = HeldWorks(steps=model.guard.steps_back)
        self._task: SeaTask | None = None
        self._error: Exception | None = None
        self._turns = 0
        self._pace = OwnPace(model.tasks.clock)
        self._hand: Hand | None = None
        if model.data is not None:
            assert model.data.epochs is not None
            self._hand = Hand(lambda: self._counters.now)
            self._hand.deal_from(model.data, batch=SAMPLES, ahead=0)
            self._hand.limit(model.data.epochs)
            self._hand.refill = self._refill

    def main(self) -> None:
        s, m = self._s, self._m
        if s.numbers.lineage == NONE:
            self._enter()
        else:
            if s.numbers.place:
                self._logbook.resume(s.numbers.place)
            self._logbook.poll()
            self._go_on()
        self._open()
        self._held.put(self._outgoing(sent) for sent in s.numbers.sents)
        self._release()
        if self._is_due():
            self._arrive(may_put_off=True)
            if self._is_due() and m.noticed_s is not None:
                m.hand_over()
        is_last = self._is_over()
        while not is_last:
            if s.seen is not None and s.step >= s.seen:
                self._go_back()
            self._pace.begin_step()
            m.tasks.sleep(m.seconds * (0.5 + m.random.random()))
            self._train()
            is_last = self._is_over()
            if not is_last:
                self._spoil()
            elif s.seen is not None:  # the logbook's samples end before its guard would see it
                self._go_back()
            self._end_step(last=is_last)
            is_last = is_last or (self._hand is not None and self._hand.is_empty)
            self._snapshot()
            if m.noticed_s is not None and not is_last:
                m.hand_over()
        m.tasks.sleep(1.0)
        assert self._courier is not None
        self._closed()
        self._courier.leave()
        m.final = ledger.digest(s.sea)

    def _first_page(self) -> SeaLogbook:
        return SeaLogbook(self._m.store, island=self._m.name, apart=_APART)  # type: ignore[arg-type]

    def damage(self, random: Random) -> None:
        """Change a number of the sea's weights."""
        sums = random.choice(self._s.sea)
        sums[self._m.name] = sums.get(self._m.name, 0) + 1

    def _is_over(self) -> bool:
        if self._hand is None:
            return self._s.step >= self._m.steps
        self._refill()
        return self._hand.is_empty

    def _train(self) -> None:
        s, hand = self._s, self._hand
        s.step += 1
        if hand is not None and hand.data is not None:
            step = hand.next_step()
            first = step.epoch * hand.data.samples
            parts = hand.positions(range(step.start, step.start + step.count))
            new = [first + at for part in parts for at in part]
            self._m.oracle.trains(self._m.name, s.numbers.lineage, len(s.trained), new)
            s.trained += new
            hand.advance(step.count)
        for portion, own in enumerate(s.own):
            q = ledger.quantity(self._m.name, s.step, portion, attempt=self._attempt)
            own[s.step] = own.get(s.step, 0) + q
            s.expected[portion] += q

    def _spoil(self) -> None:
        """Put a fault of the step that was just completed into own work, if there is one."""
        s, steps = self._s, self._m.steps if self._hand is None else None
        if s.seen is None and (seen := self._m.guard.fault(s.step, of=steps)) is not None:
            s.seen = seen
            for portion, own in enumerate(s.own):
                own[ledger.FAULT] = own.get(ledger.FAULT, 0) + _FAULT
                s.expected[portion] += _FAULT

    def _go_back(self) -> None:
        self._m.go_back(at_most=self._m.guard.at_most(self._s.step))

    def _snapshot(self) -> None:
        m, s = self._m, self._s
        now_s, draw = m.tasks.now_s, m.random.random
        durable_s = now_s + 1 + 4 * draw() if s.step % 3 == 0 else float("inf")
        state = copy.deepcopy(s)
        m.snapshots = {k: x for k, x in m.snapshots.items() if k < s.step and k >= s.step - 12}
        m.snapshots[s.step] = state, now_s + 0.05 + draw(), durable_s
        self._release()

    # -- entering --------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take the hand of the state, or enter anew if the run did so later."""
        said = returning(
            self._logbook,
            self._islands,
            lineage=self._s.numbers.lineage,
            run=f"{self._m.name}-{self._m.runs}",
            sign=lambda: self._mailbox.sign(self._m.name),
        )
        if isinstance(said, EnterAnew):
            self._m.oracle.stateless.add(self._m.name)
            self._counters.begin_anew(keeps=True)
            self._enter(keeps=True)
        elif self._hand is not None:
            self._hand.begin()

    def _enter_anew(self, *, keeps: bool) -> None:
        self._closed()
        self._courier = None
        self._held.clear()
        if not keeps:
            self._logbook = self._first_page()
        self._counters.begin_anew(keeps=keeps)
        self._s.numbers = self._counters.now
        self._enter(keeps=keeps)
        self._open()

    def _refill(self) -> None:
        hand, courier, now = self._hand, self._courier, self._counters.now
        if hand is None or courier is None or hand.is_over or hand.left >= hand.batch:
            return
        asking = Asking(
            courier,
            upto=hand.taken + now.need,
            dealt=lambda: self._counters.now.dealt,
            await_news=self._await_news,
            check=self._check,
        )
        while isinstance(said := asking.next()[0], AwaitNews):
            self._m.tasks.sleep(0.1)
        match said:
            case GoOn():
                hand.receive(said.dealt)
            case EnterAnew():
                self._enter_anew(keeps=said.keeps)

    def _enter(self, *, keeps: bool = False) -> None:
        m, s, hand = self._m, self._s, self._hand
        steps = self._islands.stride + self._islands.overlap + 1
        s.numbers.need = 0 if hand is None else steps * SAMPLES
        entrance = Entrance(
            self._logbook,
            self._mailbox,
            self._islands,
            parameters=PARAMETERS,
            first=ledger.digest("first"),
            weight=self._islands.every * SAMPLES,
            run=f"{m.name}-{m.runs}",
            clock=m.tasks.clock,
            adopted=s.numbers.adopted if keeps else None,
            dealt=None if hand is None else hand.data,
            need=s.numbers.need,
        )
        s.numbers.states = [ledger.digest(each) for each in s.sea]
        while True:
            said, data = entrance.next()
            match said:
                case GoOn():
                    break
                case LoadWeights():
                    self._load(said)
                case AdoptMerge():
                    self._adopt(said, data)
                case _:
                    m.tasks.sleep(0.2)
        if said.tide > s.numbers.adopted:
            self._counters.skip_to(said.tide, step=s.step)
        s.numbers.lineage, s.numbers.entered = said.lineage, s.numbers.adopted
        s.numbers.place, s.numbers.departs = said.place, s.step + self._islands.stride
        s.departed, s.trained = None, []
        if hand is not None:
            hand.begin(said.dealt)
        s.own = [{} for _ in s.own]
        s.expected = [each.get(m.name, 0) for each in s.sea]
        m.oracle.astray.discard(m.name)
        m.oracle.place(m.name, s.sea)

    def _load(self, said: LoadWeights) -> None:
        s = self._s
        name = said.root.removeprefix("sea/") + "/weights"
        s.sea = json.loads(self._m.store.read(name))
        s.numbers.adopted, s.numbers.bases = said.tide, list(said.bases)
        s.numbers.named = list(said.bases)
        s.numbers.states = [ledger.digest(each) for each in s.sea]

    def _open(self) -> None:
        m = self._m
        self._error = None
        self._courier = Courier(
            self._logbook,
            self._mailbox,
            self._islands,
            lineage=self._s.numbers.lineage,
            adopted=self._s.numbers.adopted,
            clock=m.tasks.clock,
            protected=lambda step: (found := m.newest(durable=False)) is not None and found >= step,
            sign=self._sign,
            remove=self._remove,
            freight=Freight(self._mailbox, submit=self._haul, clock=m.tasks.clock),
        )
        courier = self._courier
        self._task = m.tasks.start(lambda: self._errands(courier), group=m.name)

    def _haul(self, transfer: Callable[[], _T], /) -> Future[_T]:
        """Carry a transfer out beside the courier, as a thread of the process does."""
        m, future = self._m, Future[_T]()
        m.tasks.start(functools.partial(carry_out, transfer, future), group=m.name)
        return future

    def _remove(self, root: str) -> None:
        self._m.store.delete([root.removeprefix("sea/") + "/weights"])

    def _sign(self, number: int) -> Sign:
        m = self._m
        return Sign(island=m.name, run=f"{m.name}-{m.runs}", number=number, needs=self._needs())

    def _needs(self) -> int:
        found = self._m.newest(durable=True)
        step = -1 if found is None else found
        return self._counters.adopted_at(step)

    def _errands(self, courier: Courier) -> None:
        tasks, failing_s = self._m.tasks, 0.0
        while courier is self._courier:
            try:
                changed = courier.turn()
                failing_s = 0.0
            except StoreError as error:
                failing_s = failing_s or tasks.now_s
                changed = False
                if tasks.now_s - failing_s > self._islands.patience_s:
                    self._error = error
                    return
            except SeaError as error:
                self._error = error
                return
            self._turns += 1
            tasks.sleep(0.01 if changed else 0.5)

    def _closed(self) -> None:
        task, self._task = self._task, None
        courier, self._courier = self._courier, None
        while task is not None and not task.is_over:
            self._m.tasks.sleep(0.1)
        while courier is not None and not courier.freight.rest(0.0):
            self._m.tasks.sleep(0.1)
        self._courier = courier

    # -- the end of a step -----------------------------------------------------------------------

    def _end_step(self, *, last: bool) -> None:
        now, s, m = self._s.numbers, self._s, self._m
        now.samples += SAMPLES
        self._pace.end_step()
        if last:
            self._held.end()
        self._release()
        if self._is_due() or (last and now.sents):
            self._arrive(may_put_off=not last)
        if last:
            self._merge_all()
            s.own, s.numbers.over = [{} for _ in s.own], True
        elif self._counters.departs(s.step, self._islands):
            if s.departed is not None:
                m.oracle.check_stride(m.name, now.adopted, s.step - s.departed)
            s.departed = s.step
            self._depart()
        if not last:
            self._refill()

    def _merge_all(self) -> None:
        for _ in range(self._islands.portions):
            self._depart()
            self._release()
            self._arrive(hurries=True)

    def _is_due(self) -> bool:
        now = self._s.numbers
        return bool(now.sents) and self._s.step >= now.sents[0].step + self._islands.overlap

    def _depart(self, *, last: bool = False) -> None:
        now, s, step_us = self._s.numbers, self._s, self._pace.take_us()
        for portion in range(self._islands.portions) if last else self._counters.due():
            units = ledger.sent(s.own[portion])
            payload = ledger.packed(
                units,
                island=self._m.name,
                lineage=now.lineage,
                trained=len(s.trained),
                weights=self._weights(portion),
            )
            s.payloads[portion] = payload
            sent = self._counters.note_departed(
                portion,
                step=s.step,
                digest=digest_of(payload),
                nbytes=len(payload),
                step_us=step_us,
            )
            self._held.put([self._outgoing(sent, last=last)])

    def _release(self) -> None:
        if due := self._held.due(self._s.step):
            assert self._courier is not None
            self._courier.send(due)

    def _outgoing(self, sent: Sent, *, last: bool = False) -> Outgoing:
        payload, work = self._s.payloads[sent.portion], self._counters.work_of(sent, last=last)
        return Outgoing(work=work, payload=payload, step=sent.step)

    def _weights(self, portion: int) -> str:
        """Return the digest of weights that are this island's own, "" where the sea has them."""
        return ""

    def _arrival(self, kind: type[Arrival], *, hurries: bool = False) -> Arrival:
        assert self._courier is not None
        return kind(
            self._courier,
            self._islands,
            adopted=lambda: self._s.numbers.adopted,
            weight=self._counters.weight(self._s.numbers.adopted % self._islands.portions),
            await_news=self._await_news,
            check=self._check,
            clock=self._m.tasks.clock,
            nbytes=lambda _portion: ledger.PAYLOAD_BYTES,
            dealt=lambda: self._s.numbers.dealt,
            taken=lambda: self._s.numbers.taken,
            hurries=hurries,
        )

    def _arrive(self, *, hurries: bool = False, may_put_off: bool = False) -> None:
        first = self._s.numbers.adopted
        arrival = self._arrival(Arrival, hurries=hurries)
        while True:
            said, data = arrival.next()
            match said:
                case GoOn():
                    break
                case AdoptMerge():
                    self._adopt(said, data)
                case GiveWeights():
                    self._give(said)
                case AwaitNews() if may_put_off and self._m.noticed_s is not None:
                    return  # the next life begins with this
                case EnterAnew():
                    self._enter_anew(keeps=said.keeps)
                    first = self._s.numbers.adopted
                    break
                case SkipTides():
                    self._skip(said)
                    break
        if self._hand is not None and isinstance(said, GoOn):
            self._hand.receive(said.dealt)
        several = self._islands.wait != "all"
        self._counters.note_arrived(
            self._s.numbers.adopted - first if several else 1,
            place=said.place if isinstance(said, GoOn) else "",
            stride=said.stride if isinstance(said, GoOn) else 0,
        )

    def _skip(self, said: SkipTides) -> None:
        assert self._courier is not None
        self._counters.skip_to(said.tide, step=self._s.step)
        self._courier.adopted(said.tide - 1)

    def _await_news(self, timeout_s: float) -> None:
        seen, until_s = self._turns, self._m.tasks.now_s + timeout_s
        while self._turns == seen and self._m.tasks.now_s < until_s:
            self._m.tasks.sleep(0.1)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _adopt(self, said: AdoptMerge, data: list[bytes]) -> None:
        s, portion = self._s, said.portion
        sums = s.sea[portion] = self._moved(s.sea[portion], data)
        if said.own >= 0:
            s.own[portion] = ledger.without(s.own[portion], ledger.unpacked(data[said.own])[2])
        state = ledger.digest(sums)
        self._counters.note_adopted(portion, state=state, step=s.step, named=said.own >= 0)
        if self._courier is not None:
            self._courier.adopted(said.tide)
        if self._m.name in self._m.oracle.astray:
            return
        if state != self._m.oracle.state(portion, s.numbers.bases[portion], self._m.name):
            raise SeaFaultError(f"{self._m.name} has other weights after tide {said.tide}")
        if s.expected and s.numbers.lineage != NONE:
            has = sums.get(self._m.name, 0) + sum(s.own[portion].values())
            if has != s.expected[portion]:
                raise SeaFaultError(
                    f"{self._m.name} has {has} of its work of portion {portion} after tide "
                    f"{said.tide}, did {s.expected[portion]}"
                )

    def _moved(self, sums: dict[str, int], data: list[bytes]) -> dict[str, int]:
        """Return the weights of a portion after a merge of payloads."""
        return ledger.added(sums, data)

    def _give(self, said: GiveWeights) -> None:
        m, s = self._m, self._s
        root = said.root.removeprefix("sea/")
        m.store.write(f"{root}/weights", [json.dumps(s.sea).encode()])
        given = Given(by=m.name, tide=s.numbers.adopted, bases=tuple(s.numbers.bases))
        self._mailbox.give(said.request, given)
