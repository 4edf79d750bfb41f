"""Savers and removers that work at once, in every order of their store operations.

Two actors take turns, one operation at a time: one does k operations, the other n, then each runs
to its end. The slow test tries every k and n, the quick one every k with some of the n.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from checkpoint_states import copied, held, save
from doubles.memory_store import MemoryStore
from doubles.pruning import prune, remove
from fault_stores import CHANGES, Wrapped, using

from holdfast.ckpt.errors import CkptError
from holdfast.ckpt.format.manifest import MANIFEST, RETAINED
from holdfast.ckpt.store.base import Store

PATIENCE_S = 60.0
Action = Callable[[], object]


class Gated(Wrapped):
    """Stops before every operation that another actor could notice, or that could notice one."""

    def __init__(self, inner: Store, stop: Callable[[], None]) -> None:
        super().__init__(inner)
        self._stop = stop

    def about_to(self, operation: str, name: str) -> None:
        shared = operation in (*CHANGES, "names") or name.endswith((MANIFEST, RETAINED))
        if shared or (operation == "size" and "/data/" in name):
            self._stop()


@dataclass(eq=False)
class Actor:
    """A thread that goes on when told to."""

    action: Action
    store: Store = field(init=False)
    error: CkptError | None = None
    done: bool = False
    _go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    _stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def start(self, inner: Store) -> None:
        """Start, and stop before the first operation."""
        self.store = Gated(inner, self._stop)
        self._thread = threading.Thread(target=self._run, name=str(id(self)), daemon=True)
        self._thread.start()
        assert self._stopped.acquire(timeout=PATIENCE_S)

    def _stop(self) -> None:
        self._stopped.release()
        assert self._go.acquire(timeout=PATIENCE_S)

    def _run(self) -> None:
        try:
            self.action()
        except CkptError as error:
            self.error = error
        finally:
            self.done = True
            self._stopped.release()

    def step(self) -> None:
        """Do one operation."""
        if not self.done:
            self._go.release()
            assert self._stopped.acquire(timeout=PATIENCE_S)

    def finish(self) -> None:
        """Do all that is left."""
        while not self.done:
            self.step()
        self._thread.join(PATIENCE_S)


def run(store: MemoryStore, first: Actor, second: Actor, *, k: int, n: int) -> tuple[bool, bool]:
    """Let ``first`` do k operations, ``second`` n, then both the rest.

    Return whether each was at its end before its turn was over: longer turns change nothing.
    """
    by_name = {str(id(actor)): actor for actor in (first, second)}
    with using(lambda: by_name[threading.current_thread().name].store):
        first.start(store)
        second.start(store)
        for _ in range(k):
            first.step()
        over = first.done
        for _ in range(n):
            second.step()
        ended = second.done
        first.finish()
        second.finish()
    return over, ended


def saved(*steps: Action) -> MemoryStore:
    with using(store := MemoryStore()):
        for step in steps:
            step()
    return store


def of_two() -> MemoryStore:
    return saved(lambda: save(1, 10), lambda: save(3, 30))


def of_a_chain() -> MemoryStore:
    """Step 3 needs a pack of step 1 by way of step 2."""
    return saved(
        lambda: save(1, 10), lambda: save(2, 20, base=1), lambda: save(3, 30), lambda: remove("", 1)
    )


def pruned() -> None:
    prune("memory://", keep_last=1)


SCENES: dict[str, tuple[Callable[[], MemoryStore], Action, Action]] = {
    "a base is pruned": (of_two, lambda: save(4, 40, base=1), pruned),
    "a base of a base is pruned": (of_a_chain, lambda: save(4, 40, base=2), pruned),
    "a base is saved again": (of_two, lambda: save(4, 40, base=1), lambda: save(1, 11)),
    "each is the base of the other": (
        of_two,
        lambda: save(3, 31, base=1),
        lambda: save(1, 11, base=3),
    ),
    "two new savers of a step": (MemoryStore, lambda: save(1, 10), lambda: save(1, 11)),
    "two savers of an old step": (of_two, lambda: save(1, 11), lambda: save(1, 12)),
    "two savers of the same": (of_two, lambda: save(1, 11), lambda: save(1, 11)),
    "two generations": (
        MemoryStore,
        lambda: save(1, 10),
        lambda: save(1, 11, generation=2),
    ),
    "two runs": (MemoryStore, lambda: save(1, 10), lambda: save(1, 11, run="b", generation=2)),
    "two removers": (of_a_chain, pruned, pruned),
    "a step is saved again while it goes": (of_two, lambda: save(1, 11), lambda: remove("", 1)),
    "a step that went is saved again while another goes": (
        of_a_chain,
        lambda: save(1, 11),
        lambda: remove("", 2),
    ),
}


@pytest.mark.parametrize("order", [0, 1], ids=["one first", "other first"])
@pytest.mark.parametrize("scene", SCENES)
def test_in_many_orders_no_step_lacks_anything(scene: str, order: int) -> None:
    explore(scene, order, stride=13)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("order", [0, 1], ids=["one first", "other first"])
@pytest.mark.parametrize("scene", SCENES)
def test_in_every_order_no_step_lacks_anything(scene: str, order: int) -> None:
    explore(scene, order, stride=1)


def explore(scene: str, order: int, *, stride: int) -> None:
    """Try the schedules of a scene, of each k every ``stride``-th n, another one each time."""
    make, *actions = SCENES[scene]
    before = make()
    over, k = False, 0
    while not over:
        ended, n = False, -k % stride
        while not ended:
            actors = [Actor(action) for action in actions]
            store = copied(before)
            over, ended = run(store, actors[order], actors[1 - order], k=k, n=n)
            with using(store):
                try:
                    check(scene, store, actors)
                except BaseException as error:
                    errors = [actor.error for actor in actors]
                    error.add_note(f"{scene}: order {order}, k={k}, n={n}: errors {errors}")
                    raise
            n += stride
        k += 1


def check(scene: str, store: MemoryStore, actors: list[Actor]) -> None:
    """Every committed step is whole, and what a saver returned from is there, or was replaced."""
    found = held(store)
    saver, other = actors
    if "saver" in scene or "two" in scene.split()[:1]:
        assert saver.error is None or other.error is None
    if scene.startswith("a base"):
        assert other.error is None, "nobody holds a remover up"
        assert (4 in found) == (saver.error is None)
    if scene in ("two new savers of a step", "two savers of an old step", "two runs"):
        assert found[1] in (10, 11, 12)
