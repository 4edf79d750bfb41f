"""The fence of a root: only the newest generation of the newest run publishes there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from doubles.memory_store import MemoryStore
from hypothesis import given
from hypothesis import strategies as st
from run_saves import publish, written

from holdfast.ckpt import api
from holdfast.ckpt.checkpoints import fence
from holdfast.ckpt.checkpoints.catalog import committed, load_manifest, step_folder
from holdfast.ckpt.checkpoints.commit import commit
from holdfast.ckpt.checkpoints.fence import FILE, RightToPublish, RootFence
from holdfast.ckpt.errors import CorruptError, FencedError
from holdfast.ckpt.store.places import open_store


def there(root: Path) -> dict[int, tuple[str, int]]:
    store = open_store(root)
    manifests = {step: load_manifest(store, step_folder(step)) for step in committed(store)}
    return {step: (found.run, found.generation) for step, found in manifests.items()}


@pytest.mark.parametrize("step", [90, 100, 110])
def test_an_older_generation_publishes_no_step_at_all(tmp_path: Path, step: int) -> None:
    publish(tmp_path, "a", 5, 100)
    with pytest.raises(FencedError, match="generation 5 of run a publishes here"):
        publish(tmp_path, "a", 2, step)
    assert there(tmp_path) == {100: ("a", 5)}


def test_a_run_that_was_followed_by_another_replaces_nothing_and_adds_nothing(
    tmp_path: Path,
) -> None:
    publish(tmp_path, "old", 2, 100)
    publish(tmp_path, "new", 1, 120)
    for step in (110, 120, 130):
        with pytest.raises(FencedError, match="run new has begun to write here after run old"):
            publish(tmp_path, "old", 9, step)
    assert there(tmp_path) == {100: ("old", 2), 120: ("new", 1)}
    publish(tmp_path, "new", 1, 130)


def test_a_run_that_begins_fences_the_one_before_without_a_checkpoint_of_its_own(
    tmp_path: Path,
) -> None:
    publish(tmp_path, "old", 2, 100)
    fence.take(open_store(tmp_path), run="new", generation=1)
    with pytest.raises(FencedError, match="run new"):
        publish(tmp_path, "old", 2, 110)
    with pytest.raises(FencedError, match="run new"):
        fence.take(open_store(tmp_path), run="old", generation=3)


def test_a_state_of_an_older_generation_is_published_by_the_one_that_carries_it(
    tmp_path: Path,
) -> None:
    fence.take(open_store(tmp_path), run="a", generation=5)
    publish(tmp_path, "a", 2, 90, acting=5)
    assert there(tmp_path) == {90: ("a", 2)}


def test_a_run_that_begins_again_under_its_name_may_publish(tmp_path: Path) -> None:
    publish(tmp_path, "job-17", 7, 100)
    fence.take(open_store(tmp_path), run="job-17", generation=1)
    publish(tmp_path, "job-17", 1, 110)
    found = fence.load(open_store(tmp_path))
    assert found == RootFence(run="job-17", epoch=2, generation=1)


def test_a_save_by_hand_needs_no_fence_and_leaves_it_alone(tmp_path: Path) -> None:
    api.save(tmp_path, {"x": 1.5}, step=1)
    assert not (tmp_path / FILE).exists()
    publish(tmp_path, "a", 1, 2)
    before = (tmp_path / FILE).read_bytes()
    api.save(tmp_path, {"x": 2.5}, step=3)
    assert (tmp_path / FILE).read_bytes() == before
    assert sorted(there(tmp_path)) == [1, 2, 3]


def test_a_lost_right_to_act_is_found_right_before_the_publication(tmp_path: Path) -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise FencedError("the lease ran out")

    receipt = written(tmp_path, "a", 1, 4)
    with pytest.raises(FencedError, match="lease"):
        commit(
            tmp_path,
            run="a",
            step=4,
            generation=1,
            receipts=[receipt],
            mesh={},
            right=RightToPublish(run="a", generation=1, check=check),
        )
    assert there(tmp_path) == {}


def test_a_damaged_fence_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    tmp_path.joinpath(FILE).write_text("{]")
    with pytest.raises(CorruptError, match=r"fence\.json: not the record of the run"):
        publish(tmp_path, "a", 1, 4)
    assert there(tmp_path) == {}


class Hasty(MemoryStore):
    """A store in which another run takes the fence between a caller's look and its change."""

    rival = ""

    def replace(self, name: str, data: bytes, *, expected: str | None) -> bool:
        if rival := self.rival:
            self.rival = ""
            fence.take(self, run=rival, generation=1)
        return super().replace(name, data, expected=expected)


def test_of_two_runs_that_take_the_fence_at_once_the_later_one_has_it() -> None:
    store = Hasty()
    fence.take(store, run="a", generation=1)
    store.rival = "b"
    fence.take(store, run="c", generation=1)
    found = fence.load(store)
    assert found == RootFence(run="c", epoch=3, generation=1, former=("a", "b"))
    with pytest.raises(FencedError, match="run c has begun to write here after run b"):
        fence.require(store, RightToPublish(run="b", generation=1))


def test_a_generation_that_is_overtaken_while_it_takes_the_fence_is_refused() -> None:
    store = Hasty()
    fence.take(store, run="a", generation=1)
    store.rival = "b"
    with pytest.raises(FencedError, match="run b"):
        fence.require(store, RightToPublish(run="a", generation=2))


def test_the_file_stays_small_over_any_number_of_runs() -> None:
    store = MemoryStore()
    for number in range(400):
        fence.take(store, run=f"{number:x}-abcdef", generation=1)
    assert (store.size(FILE) or 0) < 8000
    found = fence.load(store)
    assert found is not None
    assert found.epoch == 400
    assert len(found.former) == 256


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), min_size=1, max_size=30
    )
)
def test_epoch_and_generation_only_grow_while_a_run_holds_the_fence(
    acts: list[tuple[str, int, bool]],
) -> None:
    store, over = MemoryStore(), set[str]()
    for run, generation, begins in acts:
        before = fence.load(store)
        try:
            if begins:
                fence.take(store, run=run, generation=generation)
            else:
                fence.require(store, RightToPublish(run=run, generation=generation))
        except FencedError:
            after = fence.load(store)
            assert after == before
            assert before is not None
            assert run in over or generation < before.generation
            continue
        after = fence.load(store)
        assert after is not None
        assert run not in over
        assert (after.run, after.generation) == (run, generation)
        if before is not None:
            assert (after.epoch, after.generation) >= (before.epoch, before.generation)
            if before.run != run:
                over.add(before.run)
                assert after.epoch == before.epoch + 1


def test_a_reader_of_tomorrows_fence_ignores_what_it_does_not_know() -> None:
    store = MemoryStore()
    later = {"format": 1, "run": "a", "epoch": 3, "generation": 2, "former": [], "more": 1}
    store.write(FILE, [msgspec.json.encode(later)])
    fence.require(store, RightToPublish(run="a", generation=2))
