"""Loaders with real worker processes: resized, killed, abandoned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_worlds import (
    Numbers,
    Seen,
    StatefulStream,
    Stream,
    World,
    alone,
    as_list,
    make_loader,
)
from reading_sets import LOCK, Broken, Deadly, Hanging, Locking, Named, Noisy, Noting, Slow
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from tree import HELPERS, ROOT

from holdfast.ckpt.types import Json
from holdfast.elastic.data.loaders import Loader
from holdfast.elastic.data.workers import feed as feeds
from holdfast.elastic.data.workers.feed import Feed, WorkerStart
from holdfast.elastic.data.workers.starter import STARTER, StarterContext
from holdfast.elastic.errors import GenerationOverError, JobFailedError
from holdfast.elastic.events import (
    DataWorkerDeath,
    DataWorkerHang,
    DataWorkersForked,
    LoaderEvent,
    of_kind,
)

SIZE, MICROBATCHES, BATCH = 37, 4, 10
STEPS = 11  # nearly three epochs


def trained(turns: list[tuple[int, int]], dataset: Any, **how: Any) -> list[Seen]:
    """Return what a history of (ranks, steps) trains, each world ended in the middle of a step."""
    seen: list[Seen] = []
    states: dict[str, Json] = {}
    for ranks, steps in turns:
        world = World(
            ranks,
            states,
            microbatches=MICROBATCHES,
            make=lambda site: make_loader(dataset, site, batch=BATCH, **how),
        )
        seen += [world.step() for _ in range(steps)]
        states = world.states
        world.read_ahead()
        world.close()
    return seen


@pytest.mark.parametrize(
    ("dataset", "factory"),
    [
        (Noisy(SIZE), DataLoader),
        (Stream(SIZE), DataLoader),
        (StatefulStream(SIZE), StatefulDataLoader),
        pytest.param(Noisy(SIZE), StatefulDataLoader, marks=pytest.mark.exhaustive),
        pytest.param(Stream(SIZE), StatefulDataLoader, marks=pytest.mark.exhaustive),
        pytest.param(StatefulStream(SIZE), DataLoader, marks=pytest.mark.exhaustive),
    ],
)
def test_what_workers_read_ahead_is_neither_lost_nor_repeated_by_a_resize(
    factory: Callable[..., Any], dataset: Any
) -> None:
    how = {"factory": factory, "num_workers": 2, "prefetch_factor": 3}
    seen = trained([(2, 3), (1, 3), (3, STEPS - 6)], dataset, **how)
    assert seen == trained([(1, STEPS)], dataset), "the world, or the workers, show"
    first = [s for step in seen if step.epoch == 0 for m in step.samples.values() for s in m]
    assert sorted(s if isinstance(s, int) else s[0] for s in first) == list(range(SIZE))


def all_of(loader: Loader) -> list[int]:
    return [index for piece in loader.pieces() for index in piece.fetch()]


def test_a_killed_worker_process_costs_no_sample_and_no_error(tmp_path: Path) -> None:
    log = LoaderEvents()
    site = alone({}, 2, emit=log)
    dataset = Deadly(40, tmp_path / "died")
    loader = make_loader(dataset, site, batch=8, num_workers=1)
    found = []
    for _ in range(5):
        found += all_of(loader)
        loader.advance()
    loader.close()
    assert sorted(found) == list(range(40))
    (died,) = of_kind(log.events, DataWorkerDeath)
    assert (log.kinds, died.times) == (["data_worker_died"], 1)
    assert "killed by SIGKILL" in died.how


def test_a_worker_process_killed_while_nobody_waits_is_noticed_at_the_next_batch() -> None:
    loader = make_loader(Numbers(64), alone({}, 2), batch=4, num_workers=2, prefetch_factor=1)
    found = all_of(loader)
    loader.advance()
    for pid in loader.worker_pids():
        os.kill(pid, signal.SIGKILL)
    while len(found) < 64:
        found += all_of(loader)
        loader.advance()
    loader.close()
    assert sorted(found) == list(range(64))


def test_workers_that_always_die_end_the_job_with_the_reason() -> None:
    loader = make_loader(Deadly(40, None), alone({}, 2), batch=40, num_workers=1)
    with pytest.raises(JobFailedError, match=r"died 3 times .* killed by SIGKILL"):
        all_of(loader)
    loader.close()


def test_the_error_of_a_data_set_arrives_as_it_is() -> None:
    loader = make_loader(Broken(8), alone({}, 2), batch=4, num_workers=1)
    with pytest.raises(LookupError, match="no sample"):
        all_of(loader)
    loader.close()


def test_a_wait_for_data_is_left_when_the_generation_ends() -> None:
    def check() -> None:
        if loader.worker_pids():
            raise GenerationOverError("generation 1 is over")

    loader = make_loader(Slow(6), alone({}, 1, check=check), batch=6, num_workers=1)
    with pytest.raises(GenerationOverError):
        all_of(loader)
    pids = loader.worker_pids()
    loader.close()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_closing_ends_the_workers_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    how: dict[str, Any] = {"num_workers": 2, "worker_init_fn": WorkerStart(None)}
    for _ in range(5):
        context = StarterContext(imports_main=False)
        feed = Feed(DataLoader(Numbers(1000), multiprocessing_context=context, **how))
        assert feed.get(lambda: None).item() == 0
        pids = feed.pids()
        feed.close()
        assert len(pids) == 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
        assert not thread.is_alive(), thread


def test_the_end_of_a_rank_waits_for_the_thread_that_makes_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left: list[threading.Thread] = []
    monkeypatch.setattr(feeds, "leave_behind", left.append)
    how: dict[str, Any] = {"num_workers": 1, "worker_init_fn": WorkerStart(None)}
    feed = Feed(DataLoader(Numbers(1000), **how))
    assert feed.get(lambda: None).item() == 0
    assert [thread.name for thread in left] == ["data"]
    feed.close()
    left[0].join(timeout=20)
    assert not left[0].is_alive()


RANK = """
import sys, time
sys.path[:0] = {paths!r}
from reading_sets import Hanging, Numbers
from loader_worlds import alone, make_loader
from pathlib import Path
if __name__ == "__main__":
    def tell(event): print(event.kind, *loader.worker_pids(), flush=True)
    loader = make_loader(Numbers(1000), alone({{}}, 1, emit=tell), batch=1, num_workers=2, {how})
    for piece in loader.pieces():
        piece.fetch()
    print("read", *loader.worker_pids(), flush=True)
    time.sleep(1000)
"""


@contextmanager
def rank(folder: Path, how: str, *, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that loads with two workers, started as ``how`` says."""
    paths = [str(HELPERS), str(ROOT / "tests" / "property" / "helpers")]
    script = folder / "rank.py"
    script.write_text(RANK.format(paths=paths, how=how))
    env = {**os.environ, "TMPDIR": str(temporary)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, script], **pipes, env=env, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets that lie in it."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "context", [None, "fork", pytest.param("forkserver", marks=pytest.mark.exhaustive)]
)
def test_workers_die_with_their_rank(tmp_path: Path, temporary: Path, context: str | None) -> None:
    how = f"multiprocessing_context={context!r}"
    with rank(tmp_path, how, temporary=temporary) as process:
        assert process.stdout is not None
        output = [process.stdout.readline()]
        while output[-1] and not output[-1].startswith("read"):  # one that died is replaced
            output.append(process.stdout.readline())
        said, *pids = output[-1].split() or output
        assert (said, len(pids)) == ("read", 2), output  # of which one may still be starting
        children = descendants(process.pid)
        assert set(map(int, pids)) <= set(children)
        if context is None:
            assert not list(temporary.iterdir()), "nothing that would be left there"
            assert "/dev/shm/sem." not in Path(f"/proc/{process.pid}/maps").read_text()
        process.kill()
        process.wait()
        await_end(children)


def test_a_fork_server_without_room_for_its_socket_is_told_with_its_remedy(tmp_path: Path) -> None:
    temporary = tmp_path / ("t" * 100)
    temporary.mkdir()
    how = "multiprocessing_context='forkserver'"
    with rank(tmp_path, how, temporary=temporary) as process:
        said, _ = process.communicate(timeout=250)
    assert f"lies below {temporary}; set a shorter TMPDIR" in said


def test_workers_that_stand_still_in_their_start_die_with_their_rank(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    turns.mkdir()
    how = f"first_batch_s=60, worker_init_fn=Hanging(Path({str(turns)!r}), times=9)"
    with rank(tmp_path, how, temporary=tmp_path) as process:
        while len(list(turns.glob("stuck-*"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        children = descendants(process.pid)
        assert len(children) >= 3, "two workers and who started them"
        process.kill()
        process.wait()
        await_end(children)


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 4  # torch's own watch in the worker looks every five seconds
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("context", [None, "spawn"])
def test_an_own_init_function_runs_in_every_worker(tmp_path: Path, context: str | None) -> None:
    how = {"worker_init_fn": Noting(tmp_path), "multiprocessing_context": context}
    loader = make_loader(
        Numbers(8), alone({}, 1), batch=8, num_workers=1, collate_fn=as_list, **how
    )
    assert sorted(all_of(loader)) == list(range(8))
    loader.close()
    assert (tmp_path / "0").exists()


class LoaderEvents:
    """The events of a loader."""

    def __init__(self) -> None:
        self.events: list[LoaderEvent] = []

    def __call__(self, event: LoaderEvent) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def test_a_lock_that_a_thread_of_the_rank_holds_does_not_stop_the_workers() -> None:
    log = LoaderEvents()
    with LOCK:  # for ever, as a process sees it that is forked now
        loader = make_loader(Locking(8), alone({}, 1, emit=log), batch=8, num_workers=2)
        assert sorted(all_of(loader)) == list(range(8))
    loader.close()
    assert log.kinds == []


def test_a_forked_worker_that_stands_still_is_replaced() -> None:
    log, beats = LoaderEvents(), []
    LOCK.acquire()
    how = {"multiprocessing_context": "fork", "first_batch_s": 0.5}

    def emit(event: LoaderEvent) -> None:
        log(event)
        LOCK.release()

    site = alone({}, 1, emit=emit, beat=lambda: beats.append(1))
    loader = make_loader(Locking(8), site, batch=8, num_workers=1, **how)
    assert sorted(all_of(loader)) == list(range(8))
    loader.close()
    assert log.kinds == ["data_worker_stuck"]
    assert "gave nothing for 0.5 s" in of_kind(log.events, DataWorkerHang)[0].how
    assert beats, "meanwhile the rank is not taken for hung itself"


@pytest.mark.parametrize("factory", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stuck", [0, 1])
def test_a_worker_that_hangs_in_its_start_is_replaced_by_a_forked_one(
    tmp_path: Path, stuck: int, factory: Callable[..., Any]
) -> None:
    log = LoaderEvents()
    how = {"worker_init_fn": Hanging(tmp_path, times=stuck), "first_batch_s": 2.0}
    loader = make_loader(
        Numbers(8), alone({}, 2, emit=log), batch=4, num_workers=2, factory=factory, **how
    )
    found = all_of(loader)
    loader.advance()
    found += all_of(loader)
    pids = loader.worker_pids()
    loader.close()
    assert sorted(found) == list(range(8))
    assert log.kinds[:stuck] == ["data_worker_stuck"] * stuck
    assert not any(_lives(pid) for pid in pids)


def test_workers_that_always_hang_in_their_start_end_the_job_with_the_remedy(
    tmp_path: Path,
) -> None:
    log = LoaderEvents()
    how = {"worker_init_fn": Hanging(tmp_path, times=99), "first_batch_s": 0.4}
    loader = make_loader(Numbers(8), alone({}, 1, emit=log), batch=8, num_workers=1, **how)
    with pytest.raises(JobFailedError, match=r"stuck 3 times .*first_batch_s"):
        all_of(loader)
    loader.close()
    assert log.kinds.count("data_worker_stuck") == 3


def test_tensors_of_workers_come_from_processes_that_the_rank_did_not_fork() -> None:
    loader = make_loader(Named(64), alone({}, 1), batch=64, num_workers=2, collate_fn=torch.stack)
    (batch,) = (piece.fetch() for piece in loader.pieces())
    pids, parents = batch[:, 1].unique().tolist(), batch[:, 2].unique().tolist()
    assert sorted(batch[:, 0].tolist()) == list(range(64))
    assert set(pids) <= set(loader.worker_pids())
    assert parents == [STARTER.pid]
    loader.close()


def test_what_cannot_be_pickled_is_read_by_forked_workers_and_the_log_says_why() -> None:
    class Local(Numbers):
        pass

    log = LoaderEvents()
    loader = make_loader(Local(8), alone({}, 1, emit=log), batch=8, num_workers=1)
    assert sorted(all_of(loader)) == list(range(8))
    loader.close()
    assert log.kinds == ["data_workers_forked"]
    assert "cannot be pickled" in of_kind(log.events, DataWorkersForked)[0].why


def test_a_starter_that_is_killed_is_started_anew() -> None:
    log = LoaderEvents()
    loader = make_loader(Numbers(64), alone({}, 1, emit=log), batch=4, num_workers=1)
    found = all_of(loader)
    loader.advance()
    pids = list(loader.worker_pids())
    os.kill(STARTER.pid, signal.SIGKILL)
    await_end(pids)
    while len(found) < 64:
        found += all_of(loader)
        loader.advance()
    loader.close()
    assert sorted(found) == list(range(64))
    assert log.kinds == ["data_worker_died"]


SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from loader_worlds import alone, make_loader, Numbers
class Own(Numbers):
    pass
def main():
    def tell(event): print(event.kind)
    loader = make_loader(Own(8), alone({{}}, 1, emit=tell), batch=8, num_workers=1)
    print([index for piece in loader.pieces() for index in sorted(piece.fetch())])
    loader.close()
{call}
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [("if __name__ == '__main__': main()", []), ("main()", ["data_workers_forked"])],
    ids=["guarded", "unguarded"],
)
def test_a_script_is_imported_only_where_that_does_not_run_it(
    tmp_path: Path, call: str, said: list[str]
) -> None:
    paths = [str(ROOT / "tests" / "property" / "helpers")]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=paths, call=call))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout.splitlines() == [*said, str(list(range(8)))], done.stderr
