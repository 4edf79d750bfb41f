"""Faults from within a worker that needs no change for them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_victims import Remote, Site, struck

from holdfast.tools.chaos.faults.injector import MissedError, Victim
from holdfast.tools.chaos.faults.inside import InsideInjector

DEADLINE_S = 60.0


class Hurt:
    """Workers with agents inside, and the injector that orders them."""

    def __init__(self, folder: Path) -> None:
        self.site, self.injector = Site(folder), InsideInjector()
        self.env = self.injector.prepare(self.site, ())
        self._remotes: list[Remote] = []

    def worker(self, **more: str) -> tuple[Remote, Victim]:
        remote = Remote(self.env, **more)
        self._remotes.append(remote)
        return remote, self.site.add(f"worker/{remote.pid}", remote.pid)

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()
        self.injector.close()


@pytest.fixture
def hurt(tmp_path: Path) -> Iterator[Hurt]:
    found = Hurt(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(("kind", "code"), [("exit", 7), ("segfault", -signal.SIGSEGV)])
def test_a_worker_ends_as_it_was_ordered_to(hurt: Hurt, kind: str, code: int) -> None:
    remote, victim = hurt.worker()
    hurt.injector.strike(struck(kind, amount=7 if kind == "exit" else None), victim, hurt.site)
    assert remote.process.wait(DEADLINE_S) == code
    with pytest.raises(MissedError, match="none of its processes listens for injected faults"):
        hurt.injector.strike(struck(kind), victim, hurt.site)


def test_nothing_else_runs_while_the_lock_is_held(hurt: Hurt) -> None:
    remote, victim = hurt.worker()
    remote.does("!ticks = [time.monotonic()]")
    remote.does(
        "!threading.Thread(target=lambda: [(time.sleep(.01), ticks.append(time.monotonic())) "
        "for _ in range(10**9)], daemon=True).start()"
    )
    hurt.injector.strike(struck("gil-lockup", lasts_s=1.0), victim, hurt.site)
    longest, deadline_s = 0.0, time.monotonic() + DEADLINE_S
    while longest < 0.95:
        assert time.monotonic() < deadline_s
        longest = remote.does("max((b - a for a, b in zip(ticks[:-1], ticks[1:])), default=0)")


def test_memory_is_taken_up_to_the_limit_and_given_back(hurt: Hurt) -> None:
    remote, victim = hurt.worker()
    undo = hurt.injector.strike(struck("memory-balloon", amount=64, lasts_s=60), victim, hurt.site)
    assert undo is not None
    await_that(lambda: resident_mib(remote.pid) > 64)
    undo()
    await_that(lambda: resident_mib(remote.pid) < 60)


def test_processors_are_kept_busy_while_the_program_goes_on(hurt: Hurt) -> None:
    remote, victim = hurt.worker()
    undo = hurt.injector.strike(struck("cpu-burn", amount=1, lasts_s=60), victim, hurt.site)
    assert undo is not None
    await_that(lambda: remote.does("time.process_time()") > 0.5)
    undo()
    await_that(lambda: remote.does("threading.active_count()") == 2)  # itself and the agent


def test_the_own_sitecustomize_is_run_too(hurt: Hurt, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'yes'\n")
    shim = hurt.env["PYTHONPATH"].partition(":")[0]
    hurt.env = {**hurt.env, "PYTHONPATH": f"{shim}:{tmp_path}"}
    remote, victim = hurt.worker()
    assert remote.does("os.environ.get('OWN')") == "yes"
    assert remote.does("sys.modules['sitecustomize'].__file__").startswith(str(tmp_path))
    assert remote.does("'torch' in sys.modules") is False
    with pytest.raises(MissedError, match=r"imported torch\.optim"):
        hurt.injector.strike(struck("nan-loss"), victim, hurt.site)


def test_training_goes_wrong_for_one_step(hurt: Hurt) -> None:
    remote, victim = hurt.worker()
    for line in (
        "import torch",
        "torch.manual_seed(0); model = torch.nn.Linear(8, 4); model.double()",
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.0); x = torch.ones(2, 8).double()",
        "seen = lambda: [p.grad.detach().clone() for p in model.parameters()]",
        "loss = lambda: model(x).square().mean()",
        "back = lambda: (optimizer.zero_grad(), l := loss(), l.backward(), l.item())[-1]",
        "step = lambda: (back(), optimizer.step())[0]",
        "step(); clean = seen()",
        "bits = lambda t: t.view(torch.int64).flatten().tolist()",
        "changes = lambda: [(a ^ b) & (2**64 - 1) for p, q in zip(clean, seen()) "
        "for a, b in zip(bits(p), bits(q))]",
        "flips = lambda: sum(each.bit_count() for each in changes())",
    ):
        remote.does("!" + line)
    calm = remote.does("step()")
    assert remote.does("flips()") == 0

    for kind, is_so in (("nan-loss", math.isnan), ("inf-loss", math.isinf)):
        hurt.injector.strike(struck(kind), victim, hurt.site)
        await_that(lambda is_so=is_so: is_so(remote.does("back()")))
        assert remote.does("any(bool(g.isfinite().any()) for g in seen())") is False
        assert remote.does("step()") == calm

    hurt.injector.strike(struck("corrupt-gradient", amount=3), victim, hurt.site)
    await_that(lambda: (remote.does("step()"), remote.does("flips()"))[1] == 3)
    assert remote.does("step()") == calm
    assert remote.does("flips()") == 0

    undo = hurt.injector.strike(struck("slow-rank", amount=0.2, lasts_s=60), victim, hurt.site)
    assert undo is not None
    took = "(time.monotonic(), step(), time.monotonic())"
    await_that(lambda: (t := remote.does(took))[2] - t[0] >= 0.2)
    undo()
    await_that(lambda: (t := remote.does(took))[2] - t[0] < 0.2)


def test_a_forked_child_takes_orders_of_its_own(hurt: Hurt) -> None:
    remote, _ = hurt.worker()
    remote.does("!child = os.fork(); child or time.sleep(1e6)")
    child = remote.does("child")
    victim = hurt.site.add("child", child)

    def ordered() -> bool:
        try:
            hurt.injector.strike(struck("exit", amount=9), victim, hurt.site)
        except MissedError:
            return False  # it does not listen yet
        return True

    await_that(ordered)
    assert remote.does("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])") == 9


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def await_that(holds: object) -> None:
    assert callable(holds)
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
